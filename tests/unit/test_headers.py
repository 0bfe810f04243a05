"""Image sizes from headers agree with Pillow, and hostile bytes raise nothing but ImageError."""

import io
import os
import struct

import pytest
from sample_sets import png_of

from refusals import refused
from trimtab.address import Allowed
from trimtab.errors import ImageError
from trimtab.samples.media import MAX_PIXELS, MediaFolder, image_size
from trimtab.samples.problems import BadRecordError

Image = pytest.importorskip("PIL.Image", reason="Pillow draws the test images")
from PIL import ImageOps  # noqa: E402

SIZES = [(1, 1), (17, 300), (1025, 31)]


def encode(size, kind, mode="RGB", exif=None, **options):
    buffer = io.BytesIO()
    image = Image.effect_noise(size, 60).convert(mode)
    if exif is not None:
        options["exif"] = exif
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif_of(orientation, filler=0):
    exif = Image.Exif()
    exif[0x0112] = orientation
    if filler:
        exif[0x010E] = "x" * filler  # ImageDescription, so that the tag directory is not the whole segment
    return exif.tobytes()


def written(folder, data):
    (folder / "image").write_bytes(data)
    return (folder / "image").open("rb")


VALID = {
    "png": encode((64, 48), "PNG"),
    "png palette": encode((64, 48), "PNG", "P"),
    "png exif": encode((64, 48), "PNG", exif=exif_of(6)),
    "jpeg": encode((64, 48), "JPEG"),
    "jpeg progressive": encode((64, 48), "JPEG", progressive=True),
    "jpeg exif": encode((64, 48), "JPEG", exif=exif_of(6, 60000)),
    "jpeg thumbnail": encode((64, 48), "JPEG", exif=exif_of(6, 12000)),  # a header longer than a first read
    "webp lossy": encode((64, 48), "WEBP"),
    "webp lossless": encode((64, 48), "WEBP", lossless=True),
    "webp exif": encode((64, 48), "WEBP", exif=exif_of(6)),
    "gif": encode((64, 48), "GIF", "P"),
    "bmp": encode((64, 48), "BMP"),
    "tiff": encode((64, 48), "TIFF"),
    "ppm": encode((64, 48), "PPM"),
    "jpeg 2000": encode((64, 48), "JPEG2000"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        *(("PNG", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA", "LA", "I;16")),
        *(("JPEG", mode, {}) for mode in ("L", "RGB", "CMYK")),
        ("JPEG", "RGB", {"progressive": True}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("GIF", "P", {}),
        *(("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
        ("TIFF", "RGB", {}),
        ("PPM", "RGB", {}),
        ("JPEG2000", "RGB", {}),
    ],
)
def test_sizes_equal_pillows(tmp_path, size, kind, mode, options):
    data = encode(size, kind, mode, **options)
    assert image_size(data) == size == Image.open(io.BytesIO(data)).size
    with written(tmp_path, data) as file:
        assert image_size(file.fileno()) == size


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_is_ignored_or_applied_as_exif_transpose_does(kind, orientation):
    data = encode((40, 30), kind, exif=exif_of(orientation, 200))
    assert image_size(data) == Image.open(io.BytesIO(data)).size
    assert image_size(data, exif="apply") == ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_orientation_in_xmp_counts_where_exif_has_none(kind):
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    if kind == "jpeg":
        data = encode((40, 30), "JPEG", xmp=xmp)
    elif kind == "webp":
        data = encode((40, 30), "WEBP", xmp=xmp)
    else:
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        info.add_itxt("XML:com.adobe.xmp", xmp.decode())
        data = encode((40, 30), "PNG", pnginfo=info)
    assert image_size(data, exif="apply") == ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size == (30, 40)
    assert image_size(data) == (40, 30)


@pytest.mark.parametrize("compressed", [False, True])
def test_orientation_in_a_raw_png_profile_counts(compressed):
    from PIL.PngImagePlugin import PngInfo

    payload = exif_of(8)
    info = PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n{len(payload):8}\n{payload.hex()}\n", zip=compressed)
    data = encode((40, 30), "PNG", pnginfo=info)
    assert image_size(data, exif="apply") == ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size == (30, 40)


def test_jpeg_with_an_appendix_is_whole_but_a_thumbnails_end_marker_does_not_count():
    whole = encode((64, 48), "JPEG")
    assert image_size(whole + bytes(2_000_000)) == (64, 48)
    thumbnail = b"\xff\xe1" + struct.pack(">H", 4) + b"\xff\xd9"
    with refused(ImageError, "JPEG"):
        image_size(whole[:2] + thumbnail + whole[2:-2])


def test_more_pixels_than_pillow_opens_or_than_is_asked_for_are_refused():
    assert image_size(png_of(MAX_PIXELS // 2, 2)) == (MAX_PIXELS // 2, 2)
    with refused(ImageError, "178956970"):
        image_size(png_of(MAX_PIXELS // 2 + 1, 2))
    for name in ("png", "gif", "webp lossy"):
        with refused(ImageError, "64", "48", "3071"):
            image_size(VALID[name], max_pixels=64 * 48 - 1)


HOSTILE = {
    "empty": (b"", "is empty"),
    "text": (b"<html>not found</html>", "not an image, or truncated: it starts with b'<html>no'"),
    "png signature only": (b"\x89PNG\r\n\x1a\n", "not an image, or truncated"),
    "png zero wide": (png_of(0, 10), "no pixel|not an image"),
    "png bomb": (png_of(60000, 60000), "more than 178956970"),
    "png odd depth": (png_of(10, 10, depth=3), "not an image"),
    "png half": (VALID["png"][: len(VALID["png"]) // 2], "truncated: a PNG"),
    "png without end": (VALID["png"][:-12], "truncated: a PNG"),
    "jpeg start only": (b"\xff\xd8", "not an image|not a readable image"),
    "jpeg half": (VALID["jpeg"][: len(VALID["jpeg"]) // 2], "truncated: a JPEG"),
    "jpeg cut in exif": (VALID["jpeg exif"][:3000], "truncated|not a readable image"),
    "jpeg fill": (b"\xff\xd8" + b"\xff" * (1 << 20), "no end of the header in 100,000 parts"),
    "webp header only": (b"RIFF\x10\0\0\0WEBPVP8 ", "truncated: a WebP"),
    "webp half": (VALID["webp lossy"][: len(VALID["webp lossy"]) // 2], "truncated: a WebP"),
    "webp odd chunk": (b"RIFF\x20\0\0\0WEBPABCD" + bytes(40), "no start of"),
    "webp lossless unsigned": (b"RIFF\x20\0\0\0WEBPVP8L" + bytes(40), "no start of"),
    "webp no key frame": (b"RIFF\x20\0\0\0WEBPVP8 " + bytes(40), "no start of"),
    "webp zero wide": (
        b"RIFF\x20\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a" + bytes(40),
        "holds no pixel|not a readable",
    ),
    "webp bomb": (
        b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff" * 6 + bytes(10),
        "pixels, more than 178956970|could not create decoder",  # the last is Pillow 11.3
    ),
    "gif half": (VALID["gif"][: len(VALID["gif"]) // 2], "not a readable image .*truncated"),
    "bmp half": (VALID["bmp"][: len(VALID["bmp"]) // 2], "not a readable image .*truncated"),
    "tiff garbage": (b"II*\0" + b"\xff" * 60, "not an image|not a readable image"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC of brand b'heic'"),
    "film": (b"\0\0\0\x18ftypisom\0\0\0\0avc1mp41", "a video or another file of brand b'isom'"),
    "avif garbage": (b"\0\0\0\x1cftypavif" + bytes(20), "not an image|not a readable image"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("exif", ["ignore", "apply"])
def test_a_hostile_image_is_refused_with_its_reason(tmp_path, name, exif):
    data, reason = HOSTILE[name]
    with pytest.raises(ImageError, match=reason):
        image_size(data, exif=exif)
    with written(tmp_path, data) as file, pytest.raises(ImageError, match=reason):
        image_size(file.fileno(), exif=exif)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, "/dev/zero", tmp_path / "fifo"):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with refused(ImageError):
            image_size(fd)
        os.close(fd)
    with refused(ImageError):
        image_size(fd)


def size_or_refusal(data, exif):
    try:
        width, height = image_size(data, exif=exif)
    except ImageError:
        return None
    assert width > 0
    assert height > 0
    assert width * height <= MAX_PIXELS
    return width, height


@pytest.mark.parametrize(
    "name", [name for name in VALID if name.split()[0] in ("png", "jpeg", "webp", "bmp") and "2000" not in name]
)
def test_every_truncation_is_found(tmp_path, name):
    data = VALID[name]
    with written(tmp_path, data) as file:
        assert image_size(file.fileno()) == image_size(data)
    for cut in [*range(0, len(data), 97), len(data) - 1, len(data) - 2]:
        assert size_or_refusal(data[:cut], "ignore") is None, cut
        with written(tmp_path, data[:cut]) as file:
            assert size_or_refusal(file.fileno(), "ignore") is None, cut


def test_the_short_header_of_os2_is_read(tmp_path):
    data = b"BM" + struct.pack("<IHHI", 30, 0, 0, 26) + struct.pack("<IHHHH", 12, 1, 1, 1, 24) + bytes(4)
    for length in range(len(data) + 1):
        with written(tmp_path, data[:length]) as file:
            assert size_or_refusal(file.fileno(), "ignore") == size_or_refusal(data[:length], "ignore")
    assert image_size(data) == (1, 1)


@pytest.mark.parametrize("name", ["folder", "pipe"])
def test_what_is_no_regular_file_is_a_bad_record_to_every_reader(tmp_path, name):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    media = MediaFolder(tmp_path, allowed=Allowed(), exif="ignore")
    for read in (media.image_size, media.read):
        with refused(BadRecordError, name):
            read(name)
