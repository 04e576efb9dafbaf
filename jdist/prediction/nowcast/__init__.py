"""Weight nowcasters: each weight predicted from its last values."""
