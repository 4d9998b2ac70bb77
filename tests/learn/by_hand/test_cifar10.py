"""Images from files: CIFAR-10's own batches, folders of images, and what is wrong with them in one line."""

import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.errors import UserError
from learn.by_hand import image_files
from learn.by_hand.cifar10 import ImageData, load_images
from learn.by_hand.cifar10_batches import CLASSES

ROWS = 3  # of a batch
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
Rows = tuple[np.ndarray, list[int]]


def rows_of(batch: int) -> Rows:
    """Pixels as the files have them, uint8, (rows, 3072), a colour after the other; and labels."""
    pixels = np.random.default_rng(batch).integers(256, size=(ROWS, 3072)).astype(np.uint8)
    return pixels, [(batch + row) % 10 for row in range(ROWS)]


def binary(pixels: np.ndarray, labels: list[int]) -> bytes:
    return b"".join(bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True))


def string(text: bytes) -> bytes:
    """A string as Python 2 pickles it."""
    return b"T" + struct.pack("<i", len(text)) + text


def python_2_pickle(pixels: np.ndarray, labels: list[int], dtype: bytes = b"u1") -> bytes:
    """A batch as CIFAR-10's authors wrote it, with Python 2 and protocol 2."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R"
    shape = b"".join(b"J" + struct.pack("<i", size) for size in pixels.shape)
    dtype = b"cnumpy\ndtype\n" + string(dtype) + b"K\x00K\x01\x87R(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    array += b"(K\x01" + shape + b"\x86" + dtype + b"\x89" + string(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


def write_batches(folder: Path, write: Callable[[np.ndarray, list[int]], bytes], suffix: str = "") -> Path:
    folder.mkdir()
    for number, name in enumerate(BATCHES):
        (folder / f"{name}{suffix}").write_bytes(write(*rows_of(number)))
    return folder


def write_images(folder: Path) -> Path:
    """Two classes of a training image each, and a test image of each; the dog is larger than the others."""
    for split in ("train", "test"):
        for label, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True)
            size = 48 if (split, name) == ("train", "dog") else 32
            Image.new("RGB", (size, size), (10, 20, 100 * label)).save(folder / split / name / "0.png")
    (folder / "train/cat/notes.txt").write_text("no image")
    return folder


def packed(folder: Path, inside: str = "") -> Path:
    archive = folder.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, inside or folder.name)
    return archive


def check_batches(data: ImageData) -> None:
    pixels, labels = (np.concatenate(part) for part in zip(*(rows_of(number) for number in range(5)), strict=True))
    assert data.classes == CLASSES
    assert data.train.images.shape == (15, 32, 32, 3)
    assert np.array_equal(data.train.images[4, :, :, 1].ravel(), pixels[4, 1024:2048])
    assert data.train.labels.tolist() == labels.tolist()
    assert data.test.labels.tolist() == rows_of(5)[1]


def error_of(path: Path | str) -> str:
    with pytest.raises(UserError) as refused:
        load_images(str(path))
    assert str(refused.value).startswith(f"--data {path}: ")
    assert "\n" not in str(refused.value)
    return str(refused.value).removeprefix(f"--data {path}: ")


def test_binary_and_python_batches_and_their_archive_hold_the_same_images(tmp_path: Path) -> None:
    binaries = write_batches(tmp_path / "cifar-10-batches-bin", binary, ".bin")
    pickles = write_batches(tmp_path / "cifar-10-batches-py", python_2_pickle)

    for place in (binaries, pickles, packed(binaries), packed(pickles)):
        check_batches(load_images(str(place)))


def test_batches_that_numpy_2_has_pickled_again_hold_the_same_images(tmp_path: Path) -> None:
    folder = write_batches(
        tmp_path / "batches", lambda pixels, labels: pickle.dumps({b"data": pixels, b"labels": labels}, protocol=4)
    )

    check_batches(load_images(str(folder)))


def test_the_stand_in_for_python_2s_pickles_is_what_numpy_reads(tmp_path: Path) -> None:
    pixels, labels = rows_of(0)

    batch = pickle.loads(python_2_pickle(pixels, labels), encoding="bytes")

    assert np.array_equal(batch[b"data"], pixels)
    assert batch[b"labels"] == labels


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (b"cos\nsystem\n(S'touch ran'\ntR.", "os.system"),
        (b'cbuiltins\nexec\n(S\'open("ran", "w")\'\ntR.', "builtins.exec"),
        (b"(S'touch ran'\nios\nsystem\n.", "os.system"),
        (b"\x80\x02cnumpy\nload\n(S'ran'\ntR.", "numpy.load"),
    ],
)
def test_a_pickle_that_brings_code_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: bytes, named: str
) -> None:
    folder = write_batches(tmp_path / "batches", python_2_pickle)
    (folder / "data_batch_2").write_bytes(code)
    monkeypatch.chdir(tmp_path)

    assert error_of(folder).startswith(
        f"data_batch_2: not a Python batch of CIFAR-10 (it asks for {named}, which is not part of"
    )
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_3", b"", "data_batch_3: not a Python batch of CIFAR-10 "),
        ("data_batch_3", b"\x80\x02}.", "data_batch_3: not a Python batch of CIFAR-10 "),
        ("data_batch_3", python_2_pickle(*rows_of(0), dtype=b"O8"), "data_batch_3: .*an array of type b'O8'"),
        ("data_batch_3", python_2_pickle(*rows_of(0))[:-40], "data_batch_3: not a Python batch of CIFAR-10 "),
        ("data_batch_3", python_2_pickle(rows_of(0)[0][:, :9], [0] * 3), r"data_batch_3: .*an array of shape \(3, 9\)"),
        ("data_batch_3", python_2_pickle(rows_of(0)[0], [0]), r"data_batch_3: 3 images, but labels of shape \(1,\)"),
        ("data_batch_3", python_2_pickle(rows_of(0)[0], [0, 10, 1]), "data_batch_3: row 1 has a label that is not 0"),
        ("test_batch.bin", b"12345", "test_batch.bin: 5 bytes are not a whole number of rows of 3,073 bytes"),
        ("test_batch.bin", b"\x0b" + bytes(3072), "test_batch.bin: row 0 has a label that is not 0 to 9"),
    ],
)
def test_a_broken_batch_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = write_batches(tmp_path / "batches", python_2_pickle)
    (folder / name).write_bytes(content)

    with pytest.raises(UserError, match=message):
        load_images(str(folder))


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    folder = write_batches(tmp_path / "batches", python_2_pickle)
    (folder / "data_batch_4").unlink()

    assert error_of(folder).startswith("data_batch_4 or data_batch_4.bin: is missing")


def test_a_folder_of_images_and_its_archive_hold_the_same(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "pets")

    for place in (folder, packed(folder), packed(folder, "./")):
        data = load_images(str(place))
        assert data.classes == ["cat", "dog"]
        assert data.train.labels.tolist() == data.test.labels.tolist() == [0, 1]
        assert data.train.images.shape == data.test.images.shape == (2, 32, 32, 3)
        assert data.train.images[1, 5, 5].tolist() == [10, 20, 100]


def test_an_image_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "pets")
    (folder / "test/dog").rename(folder / "test/cow")
    assert error_of(folder) == "test/cow/0.png: class 'cow' is not one of the training classes cat, dog"

    (folder / "train/dog/1.jpg").write_bytes(b"no image")
    assert error_of(folder) == "train/dog/1.jpg: not a readable image (UnidentifiedImageError)"


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "pets")
    buffer = io.BytesIO()
    Image.effect_noise((32, 32), 90).save(buffer, "JPEG")
    (folder / "train/cat/1.jpg").write_bytes(buffer.getvalue()[:-200])

    assert error_of(folder).startswith("train/cat/1.jpg: not a readable image")


def test_places_without_images_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("nothing")

    assert error_of(tmp_path / "gone").startswith("no such file or folder; without a network use --data shapes")
    assert error_of(tmp_path / "empty") == "holds no train/CLASS/*.png or *.jpg"
    assert error_of(tmp_path / "notes.txt").startswith("cannot be read (")


def test_classes_that_are_links_to_folders_are_read_and_links_to_nowhere_are_not(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "pets")
    for split in ("train", "test"):
        (folder / split / "dog").rename(tmp_path / split)
        (folder / split / "dog").symlink_to(tmp_path / split)
    (folder / "train/cat/gone.png").symlink_to(tmp_path / "gone.png")
    (folder / "train/cat/around").symlink_to(folder)

    data = load_images(str(folder))

    assert data.classes == ["cat", "dog"]
    assert data.train.labels.tolist() == data.test.labels.tolist() == [0, 1]


def test_a_file_too_large_to_be_an_image_or_a_batch_is_named_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_images(tmp_path / "pets")
    (folder / "train/dog/1.png").write_bytes(bytes(5000))
    monkeypatch.setattr(image_files, "MAX_BYTES", 4999)

    for place, inside in ((folder, ""), (packed(folder), "pets/")):
        assert error_of(place) == f"{inside}train/dog/1.png: 5,000 bytes; files of more than 4,999 are not read"


def test_nothing_is_written_where_images_are_read(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "pets")
    before = sorted(tmp_path.rglob("*"))

    load_images(str(folder))

    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("~nobody-of-that-name/pets", "no such file or folder; without a network use --data shapes"),
        ("no\0name", "no such file or folder; without a network use --data shapes"),
        ("long" * 1000, "[Errno 36] File name too long"),
    ],
)
def test_a_path_that_leads_nowhere_is_one_line(path: str, message: str) -> None:
    assert error_of(path).startswith(message)


@pytest.mark.parametrize("packing", ["xz", "bz2"])
def test_a_damaged_archive_is_one_line(tmp_path: Path, packing: str) -> None:
    folder, archive = write_images(tmp_path / "pets"), tmp_path / "pets.tar"
    (folder / "train/cat/notes.txt").write_bytes(np.random.default_rng(0).bytes(20_000))
    with tarfile.open(archive, f"w:{packing}") as file:
        file.add(folder)
    content = archive.read_bytes()
    archive.write_bytes(content[:8_000] + bytes(4_000) + content[12_000:])

    assert error_of(archive).startswith("cannot be read (")
