"""A small set in the format of TensorFlow Datasets, without TensorFlow."""

import io
import json
import pathlib

import pytest


def write(folder, name, version, splits, *, num_classes, **image):
  """Writes a prepared set of images.

  Args:
    folder: the data folder.
    name: with the configuration, as "set/config".
    version: such as "1.0.0".
    splits: {name: [(encoded image, label)]}.
    num_classes: number of classes.
    **image: of the image feature, such as its `shape`.
  """
  tfds = pytest.importorskip("tensorflow_datasets")
  features = {
    "image": tfds.features.Image(**image),
    "label": tfds.features.ClassLabel(num_classes=num_classes),
  }
  records = {
    split: [{"image": encoded, "label": label} for encoded, label in pairs]
    for split, pairs in splits.items()
  }
  return _write(folder, name, version, records, features)


def write_text(folder, name, version, splits):
  """Writes a prepared set of texts: {split: [bytes]}."""
  tfds = pytest.importorskip("tensorflow_datasets")
  records = {
    split: [{"text": text} for text in texts] for split, texts in splits.items()
  }
  return _write(folder, name, version, records, {"text": tfds.features.Text()})


def _write(folder, name, version, splits, features):
  tfds = pytest.importorskip("tensorflow_datasets")
  writing = pytest.importorskip("array_record.python.array_record_module")
  from tensorflow_datasets.proto import tf_example_pb2

  path = pathlib.Path(folder) / name / version
  path.mkdir(parents=True)
  tfds.features.FeaturesDict(features).save_config(path)
  set_name, *config = name.split("/")
  infos = []
  for split, records in splits.items():
    file = path / f"{set_name}-{split}.array_record-00000-of-00001"
    writer = writing.ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
      example = tf_example_pb2.Example()
      for key, value in record.items():
        feature = example.features.feature[key]
        if isinstance(value, bytes):
          feature.bytes_list.value.append(value)
        else:
          feature.int64_list.value.append(value)
      writer.write(example.SerializeToString())
    writer.close()
    infos.append(
      {
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        "name": split,
        "numBytes": "1",
        "shardLengths": [str(len(records))],
      }
    )
  info = {
    "fileFormat": "array_record",
    "name": set_name,
    "splits": infos,
    "version": version,
  }
  if config:
    info["configName"] = config[0]
  (path / "dataset_info.json").write_text(json.dumps(info))
  return path


def encode(pixels, kind="PNG", mode=None):
  """An image file in memory."""
  image = pytest.importorskip("PIL.Image").fromarray(pixels)
  if mode is not None:
    image = image.convert(mode)
  file = io.BytesIO()
  image.save(file, kind, **({"quality": 100} if kind == "JPEG" else {}))
  return file.getvalue()
