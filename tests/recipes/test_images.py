"""Image sets in the formats in which they are handed round: the same pictures in, the same numbers out."""

import json
import pickle
import re

import numpy as np
import pytest
from PIL import Image

from polygon.domain.errors import InputError
from polygon.domain.model import Model
from runners.recipes.data import make_samples
from runners.recipes.recipe_schema import DataPart


def vit(side=32, classes=100, channels=3):
    return Model(
        name="tiny", family="vit", blocks=1, hidden_size=8, heads=2, kv_heads=2, head_dim=4, ffn_size=16,
        vocab_size=classes, max_seq_len=(side // 8) ** 2 + 1, image_size=side, patch_size=8, channels=channels,
        causal=False, tied_embeddings=False,
    )  # fmt: skip


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, size=(6, 3, 32, 32), dtype=np.uint8), np.array([3, 99, 0, 7, 7, 50])


def read(path, model, tmp_path, **part):
    place = {} if path is None else {"path": str(path)}
    data = {"kind": "images", "cache": str(tmp_path / "cache")} | place | part
    return make_samples(DataPart(**data), model, 17, 0, tmp_path)


def in_first_order(samples):
    """Images and classes of the first epoch, put back into the order of the files."""
    n = len(samples.classes)
    images, classes = samples.batch(range(n))
    back = np.argsort([samples.item(number) for number in range(n)])
    return images.numpy()[back], classes.numpy()[back]


def cifar_pickle(folder, pixels, classes):
    folder.mkdir(parents=True)
    rows = {b"data": pixels.reshape(len(pixels), -1), b"fine_labels": classes.tolist(), b"filenames": [b"a.png"]}
    (folder / "train").write_bytes(pickle.dumps(rows, protocol=2))


def cifar_binary(folder, pixels, classes):
    folder.mkdir(parents=True)
    rows = np.column_stack([classes // 5, classes, pixels.reshape(len(pixels), -1)]).astype(np.uint8)
    rows.tofile(folder / "train.bin")


@pytest.mark.parametrize(
    "write, inside", [(cifar_pickle, "cifar-100-python"), (cifar_pickle, "."), (cifar_binary, "cifar-100-binary")]
)
def test_cifar_100_in_both_formats(tmp_path, drawn, write, inside):
    """Every pixel p becomes p / 127.5 - 1 at its place, with its fine class."""
    pixels, classes = drawn
    write(tmp_path / "set" / inside if inside != "." else tmp_path / "set", pixels, classes)
    images, found = in_first_order(read(tmp_path / "set", vit(), tmp_path))
    assert np.array_equal(found, classes)
    assert np.allclose(images, pixels / 127.5 - 1, atol=1e-6)


def test_a_folder_of_images_per_class_and_food_101s_list(tmp_path):
    """Classes are the folders in order of name; where a list names the training images only those are read."""
    for name, value in (("apple_pie", 40), ("waffles", 200)):
        folder = tmp_path / "food" / "images" / name
        folder.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (60, 40), (value + number, 0, 0)).save(folder / f"{number}.png")
    images, classes = in_first_order(read(tmp_path / "food", vit(), tmp_path))
    assert classes.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.shape == (6, 3, 32, 32)
    assert np.allclose(images[:, 0, 0, 0], np.array([40, 41, 42, 200, 201, 202]) / 127.5 - 1, atol=1e-6)
    (tmp_path / "food" / "meta").mkdir()
    (tmp_path / "food" / "meta" / "train.txt").write_text("apple_pie/1\nwaffles/0\n")
    images, classes = in_first_order(read(tmp_path / "food", vit(), tmp_path))
    assert classes.tolist() == [0, 1]
    assert np.allclose(images[:, 0, 0, 0], np.array([41, 200]) / 127.5 - 1, atol=1e-6)
    (tmp_path / "food" / "meta" / "train.txt").write_text("apple_pie/9\n")
    with pytest.raises(InputError, match="found apple_pie/9"):
        read(tmp_path / "food", vit(), tmp_path)


@pytest.mark.parametrize("place", ["test", "meta", "cifar"])
def test_the_test_part_of_a_set(tmp_path, drawn, place):
    """Whatever the set calls it, the test part has its own images, and the classes of the training part."""
    pixels, classes = drawn
    if place == "cifar":
        cifar_binary(tmp_path / "set", pixels, classes)
        (tmp_path / "set" / "train.bin").rename(tmp_path / "set" / "test.bin")
        expected = classes.tolist()
    else:
        for name, value in (("apple_pie", 40), ("waffles", 200)):
            for part, number in (("train", 0), ("validation", 1)):
                folder = tmp_path / "set" / ("images" if place == "meta" else part) / name
                folder.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (32, 32), (value + number, 0, 0)).save(folder / f"{number}.png")
        if place == "meta":
            (tmp_path / "set" / "meta").mkdir()
            (tmp_path / "set" / "meta" / "test.txt").write_text("apple_pie/1\nwaffles/1\n")
        expected = [0, 1]
    images, found = in_first_order(read(tmp_path / "set", vit(), tmp_path, part="test"))
    assert found.tolist() == expected
    if place != "cifar":
        assert np.allclose(images[:, 0, 0, 0], np.array([41, 201]) / 127.5 - 1, atol=1e-6)


def test_a_set_without_a_test_part_is_refused(tmp_path):
    """Training images are never taken for it."""
    (tmp_path / "set" / "apple_pie").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(tmp_path / "set" / "apple_pie" / "0.png")
    with pytest.raises(InputError, match="of the part 'test'"):
        read(tmp_path / "set", vit(), tmp_path, part="test")


def test_the_hubs_cache(tmp_path, drawn, monkeypatch):
    """Parquet with encoded images, found below HF_HOME by the name of the set."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: parquet is not tried")
    from pyarrow import parquet

    pixels, classes = drawn
    folder = tmp_path / "hf/hub/datasets--uoft-cs--cifar100/snapshots/1234/cifar100"
    folder.mkdir(parents=True)
    encoded = []
    for picture in pixels:
        path = tmp_path / "one.png"
        Image.fromarray(picture.transpose(1, 2, 0)).save(path)
        encoded.append({"bytes": path.read_bytes(), "path": "one.png"})
    table = pa.table({"img": encoded, "fine_label": classes, "coarse_label": classes // 5})
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    images, found = in_first_order(read(None, vit(), tmp_path, kind="cifar100"))
    assert np.array_equal(found, classes) and np.allclose(images, pixels / 127.5 - 1, atol=1e-6)
    with pytest.raises(InputError, match="datasets--ethz--food101"):
        read(None, vit(), tmp_path, kind="food101")


PICTURE = {"bytes": b"GIF89a, not really", "path": "one.png"}


@pytest.mark.parametrize(
    ("images", "classes", "fault"),
    [
        ([PICTURE] * 2, [1, None], "label: found int64, 1 without one, expected a whole number for every image"),
        ([PICTURE] * 2, [0.5, 1.0], "label: found double, 0 without one"),
        ([PICTURE] * 2, ["cat", "dog"], "label: found string, 0 without one"),
        ([PICTURE | {"bytes": None}] * 2, [1, 2], "image 0: found none, expected the bytes of an image file"),
        ([PICTURE] * 2, [1, 2], "image 0: found no image that can be read"),
        ([b"nor this"] * 2, [1, 2], "image 0: found no image that can be read"),
    ],
)
def test_tables_of_images_that_are_none_are_named(tmp_path, images, classes, fault):
    """With the column or the row: not as a cache that cannot be written, nor by a traceback."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: parquet is not tried")
    from pyarrow import parquet

    (tmp_path / "set").mkdir()
    parquet.write_table(pa.table({"image": images, "label": classes}), tmp_path / "set" / "train.parquet")
    with pytest.raises(InputError, match=re.escape(f"train.parquet: {fault}")):
        read(tmp_path / "set", vit(), tmp_path)


def test_classes_that_the_hub_hides_are_named(tmp_path, drawn):
    """Test parts whose classes nobody is to know have -1 there."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: parquet is not tried")
    from pyarrow import parquet

    file = tmp_path / "one.png"
    Image.fromarray(drawn[0][0].transpose(1, 2, 0)).save(file)
    (tmp_path / "set").mkdir()
    table = pa.table({"image": [file.read_bytes()] * 2, "label": [-1, -1]})
    parquet.write_table(table, tmp_path / "set" / "test.parquet")
    with pytest.raises(InputError, match=r"classes: found -1, expected 0\.\.99, those of the model"):
        read(tmp_path / "set", vit(), tmp_path, part="test")


def test_images_are_made_to_fit(tmp_path, drawn):
    """Another side and grey values: resized and mixed, the mean stays."""
    pixels, classes = drawn
    cifar_binary(tmp_path / "set", np.full_like(pixels, 100), classes)
    images, _ = in_first_order(read(tmp_path / "set", vit(side=64, channels=1), tmp_path))
    assert images.shape == (6, 1, 64, 64)
    assert np.allclose(images, 100 / 127.5 - 1, atol=1e-6)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def emptied(path):
    path.write_bytes(b"")


def overwritten(path):
    path.write_bytes(b"no array at all" * 100)


def of_fewer(path):
    np.save(path, np.load(path)[:-1])


@pytest.mark.parametrize("damage", [cut, emptied, overwritten, of_fewer, None])
@pytest.mark.parametrize("name", ["images.npy", "classes.npy"])
def test_a_damaged_cache_is_decoded_anew(tmp_path, drawn, name, damage):
    """Whatever happened to either file, or where it is gone."""
    pixels, classes = np.tile(drawn[0], (50, 1, 1, 1)), np.tile(drawn[1], 50)
    cifar_binary(tmp_path / "set", pixels, classes)
    read(tmp_path / "set", vit(), tmp_path)
    [folder] = (tmp_path / "cache").glob("images-*")
    damaged = folder / "damaged.npy"
    damaged.write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    if damage is not None:
        damage(damaged)
        damaged.rename(folder / name)
    images, found = in_first_order(read(tmp_path / "set", vit(), tmp_path))
    assert np.array_equal(found, classes) and np.allclose(images, pixels / 127.5 - 1, atol=1e-6)


def test_repair_leaves_those_who_have_the_cache_mapped_alone(tmp_path, drawn):
    """Another run that maps the images while they are decoded anew reads what it had."""
    cifar_binary(tmp_path / "set", *drawn)
    running = read(tmp_path / "set", vit(), tmp_path)
    expected = in_first_order(running)[0]
    [folder] = (tmp_path / "cache").glob("images-*")
    cut(folder / "classes.npy")
    read(tmp_path / "set", vit(), tmp_path)
    (folder / "images.npy").write_bytes(b"")
    assert np.array_equal(in_first_order(running)[0], expected)


def test_samples_are_the_same_on_every_rank_and_epochs_differ(tmp_path, drawn):
    """A sample is a function of its number; each epoch has every image once, in another order."""
    cifar_binary(tmp_path / "set", *drawn)
    one, other = (read(tmp_path / "set", vit(), tmp_path) for _ in range(2))
    first, second = one.batch(range(6))[1].tolist(), one.batch(range(6, 12))[1].tolist()
    assert sorted(first) == sorted(second) == sorted(drawn[1].tolist())
    assert first != second
    assert other.batch(range(3, 6))[1].tolist() == first[3:]


class Attack:
    """What a hostile pickle may hold."""

    def __reduce__(self):
        return (print, ("taken over",))


@pytest.mark.parametrize(
    "content, message",
    [
        (pickle.dumps(Attack()), "no place in a data set"),
        (pickle.dumps({b"data": 1}), "expected CIFAR-100's pickle"),
        (b"garbage", "expected CIFAR-100's pickle"),
    ],
)
def test_pickles_that_are_no_data_are_refused(tmp_path, content, message, capsys):
    """A pickle may hold arrays and plain values; a program in it is not run."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path / "set", vit(), tmp_path)
    assert capsys.readouterr().out == ""


def test_what_does_not_fit_is_one_line(tmp_path, drawn):
    """Too many classes, a cut file, an empty folder, a picture that is none, no folder."""
    cifar_binary(tmp_path / "set", *drawn)
    with pytest.raises(InputError, match=r"classes: found 99, expected 0\.\.9, those of the model"):
        read(tmp_path / "set", vit(classes=10), tmp_path)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "train.bin").write_bytes(b"12345")
    with pytest.raises(InputError, match="multiple of 3074"):
        read(tmp_path / "cut", vit(), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="folder of images per class"):
        read(tmp_path / "empty", vit(), tmp_path)
    (tmp_path / "bad" / "a").mkdir(parents=True)
    (tmp_path / "bad" / "a" / "x.png").write_text(json.dumps("no picture"))
    with pytest.raises(InputError, match=r"x\.png"):
        read(tmp_path / "bad", vit(), tmp_path)
    with pytest.raises(InputError, match="a folder of images"):
        read(tmp_path / "nowhere", vit(), tmp_path)
