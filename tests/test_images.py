"""Every kind of file that a photograph or mask comes in, and every way in which one is refused."""

import hashlib
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage

from lumen_lab import images
from lumen_lab.errors import ImageError

PHOTOGRAPHS = Path(__file__).parents[1] / "data" / "photographs"

# What EXIF means by each value: the stored array turned into the upright one.
UPRIGHT_FROM_STORED = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: stored.swapaxes(0, 1)[:, ::-1],
    7: lambda stored: stored.swapaxes(0, 1)[::-1, ::-1],
    8: lambda stored: stored.swapaxes(0, 1)[::-1],
}


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def ramp_mask(height, width):
    return np.linspace(0, 1, height * width, dtype=np.float32).reshape(height, width)


def save(pixels, path, mode=None, **options):
    picture = PILImage.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(path, **options)
    return path


def write_png(path, rows, *, width, height, bits, color_type):
    """A PNG written chunk by chunk, for the kinds that Pillow does not write."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def exif_orientation(value):
    exif = PILImage.Exif()
    exif[0x0112] = value
    return exif


class TestOrientation:
    @pytest.mark.parametrize("suffix, options", [(".png", {}), (".webp", {"lossless": True}), (".tif", {})])
    @pytest.mark.parametrize("value", range(1, 9))
    def test_each_value_in_lossless_files(self, tmp_path, value, suffix, options):
        stored = noise(5, 8, 3)
        path = save(stored, tmp_path / f"photo{suffix}", exif=exif_orientation(value), **options)
        np.testing.assert_array_equal(images.load_image(path), UPRIGHT_FROM_STORED[value](stored))

    @pytest.mark.parametrize("value", range(1, 9))
    def test_each_value_in_a_jpeg(self, tmp_path, value):
        stored = np.kron(noise(2, 3, 1, seed=1), np.ones((16, 16, 3), np.uint8))
        path = save(stored, tmp_path / "photo.jpg", quality=98, subsampling=0, exif=exif_orientation(value))
        expected = UPRIGHT_FROM_STORED[value](stored)
        loaded = images.load_image(path)
        assert loaded.shape == expected.shape
        assert np.abs(loaded.astype(int) - expected).max() <= 4

    def test_a_mask_turns_with_its_image(self, tmp_path):
        stored = noise(4, 7)
        path = save(stored, tmp_path / "mask.png", exif=exif_orientation(6))
        expected = UPRIGHT_FROM_STORED[6](stored) / np.float32(255)
        np.testing.assert_array_equal(images.load_mask(path), expected)

    def test_16_bit_grey_turns_too(self, tmp_path):
        stored = noise(3, 5)
        path = save(stored * np.uint16(257), tmp_path / "grey16.png", exif=exif_orientation(8))
        np.testing.assert_array_equal(images.load_image(path)[..., 0], UPRIGHT_FROM_STORED[8](stored))

    def test_nothing_saved_carries_a_tag(self, tmp_path):
        photo = save(noise(5, 8, 3), tmp_path / "photo.png", exif=exif_orientation(6))
        image = images.load_image(photo)
        mask = ramp_mask(*image.shape[:2])
        for path in (
            images.save_mask(mask, tmp_path / "mask.png"),
            images.save_cutout(image, mask, tmp_path / "cutout.png"),
        ):
            with PILImage.open(path) as saved:
                assert saved.size == (5, 8)
                assert 0x0112 not in saved.getexif()
                assert not saved.info

    def test_unreadable_exif_is_said_and_passed_over(self, tmp_path):
        stored = noise(16, 16, 3)
        path = save(stored, tmp_path / "photo.png", exif=b"Exif\x00\x00not a TIFF header at all")
        with pytest.warns(UserWarning, match="unreadable EXIF"):
            np.testing.assert_array_equal(images.load_image(path), stored)


class TestPixelKinds:
    def test_rgb_comes_back_as_it_was(self, tmp_path):
        stored = noise(6, 4, 3)
        loaded = images.load_image(str(save(stored, tmp_path / "photo.png")))
        np.testing.assert_array_equal(loaded, stored)
        assert loaded.dtype == np.uint8 and loaded.flags.c_contiguous and loaded.flags.writeable

    def test_grey_becomes_three_equal_channels(self, tmp_path):
        stored = noise(6, 4)
        loaded = images.load_image(save(stored, tmp_path / "grey.png"))
        np.testing.assert_array_equal(loaded, np.dstack([stored] * 3))

    def test_1_bit(self, tmp_path):
        bits = noise(5, 9) > 127
        path = save(bits, tmp_path / "bits.png")
        with PILImage.open(path) as saved:
            assert saved.mode == "1"
        np.testing.assert_array_equal(images.load_image(path)[..., 1], bits * np.uint8(255))

    @pytest.mark.parametrize("suffix", [".png", ".tif"])
    def test_16_bit_grey_is_scaled_not_clipped(self, tmp_path, suffix):
        stored = np.array([[0, 128, 129, 256, 257, 32768, 65406, 65407, 65535]], dtype=np.uint16)
        loaded = images.load_image(save(stored, tmp_path / f"grey16{suffix}"))
        expected = np.rint(stored / 257).astype(np.uint8)
        np.testing.assert_array_equal(loaded, np.dstack([expected] * 3))

    @pytest.mark.parametrize("color_type, channels", [(2, 3), (4, 2), (6, 4)])
    def test_16_bit_colour_and_alpha_within_a_step(self, tmp_path, color_type, channels):
        values = np.random.default_rng(3).integers(0, 65536, (4, 6, channels)).astype(">u2")
        if channels in (2, 4):
            values[..., -1] = 65535
        rows = b"".join(b"\0" + row.tobytes() for row in values)
        path = write_png(tmp_path / "deep.png", rows, width=6, height=4, bits=16, color_type=color_type)
        colors = values[..., :3] if channels > 2 else np.repeat(values[..., :1], 3, axis=2)
        assert np.abs(images.load_image(path) - np.rint(colors / 257)).max() <= 1

    def test_32_bit_integers_beyond_16_bits_are_refused(self, tmp_path):
        path = save(np.array([[0, 70000]], dtype=np.int32), tmp_path / "deep.tif")
        with pytest.raises(ImageError, match="70000, beyond 16 bits"):
            images.load_image(path)

    @pytest.mark.parametrize("load", [images.load_image, images.load_mask])
    def test_floating_point_pixels_are_refused(self, tmp_path, load):
        path = save(np.array([[0.5, 1.0]], dtype=np.float32), tmp_path / "float.tif")
        with pytest.raises(ImageError, match="range is unknown"):
            load(path)

    def test_palette(self, tmp_path):
        colors = np.array([[255, 0, 0], [0, 128, 0], [10, 20, 250]], dtype=np.uint8)
        indices = noise(4, 6) % 3
        picture = PILImage.new("P", (6, 4))
        picture.putdata(indices.ravel().tolist())
        picture.putpalette(colors.ravel().tolist())
        picture.save(tmp_path / "palette.png")
        np.testing.assert_array_equal(images.load_image(tmp_path / "palette.png"), colors[indices])

        picture.save(tmp_path / "clear.png", transparency=1)
        expected = np.where((indices == 1)[..., None], np.uint8(255), colors[indices])
        np.testing.assert_array_equal(images.load_image(tmp_path / "clear.png"), expected)

    @pytest.mark.parametrize("background", [(255, 255, 255), (0, 40, 200)])
    def test_alpha_is_composited(self, tmp_path, background):
        stored = noise(6, 5, 4, seed=2)
        stored[0, :, 3] = (0, 255, 1, 128, 254)
        loaded = images.load_image(save(stored, tmp_path / "alpha.png"), background=background)
        alpha = stored[..., 3:] / 255
        expected = stored[..., :3] * alpha + np.array(background) * (1 - alpha)
        assert np.abs(loaded - expected).max() <= 1
        assert tuple(loaded[0, 0]) == background

    def test_grey_with_alpha(self, tmp_path):
        loaded = images.load_image(save(np.array([[[40, 255], [40, 0]]], np.uint8), tmp_path / "la.png"))
        assert loaded[0, :, 0].tolist() == [40, 255]

    def test_a_background_that_is_no_colour(self, tmp_path):
        path = save(noise(2, 2, 4), tmp_path / "alpha.png")
        with pytest.raises(ImageError, match=r"\(R, G, B\)"):
            images.load_image(path, background=(1, 2, 3, 4))

    def test_adobe_cmyk_jpeg_is_not_inverted(self, tmp_path):
        blocks = np.kron(
            np.array([[[250, 250, 250], [200, 30, 40]], [[20, 20, 20], [30, 60, 190]]]), np.ones((16, 16, 1))
        )
        path = save(blocks.astype(np.uint8), tmp_path / "print.jpg", mode="CMYK", quality=98, subsampling=0)
        assert b"Adobe" in path.read_bytes()[:200]
        with pytest.warns(UserWarning, match="CMYK"):
            loaded = images.load_image(path)
        assert np.abs(loaded.astype(int) - blocks).max() <= 12

    def test_an_animation_gives_its_first_frame(self, tmp_path):
        frames = [PILImage.fromarray(np.full((4, 4), value, np.uint8)) for value in (10, 200)]
        frames[0].save(tmp_path / "two.gif", save_all=True, append_images=frames[1:])
        assert (images.load_image(tmp_path / "two.gif") == 10).all()


class TestRefusals:
    @pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".tif"])
    @pytest.mark.parametrize("share", [0.3, 0.7])
    def test_a_truncated_file(self, tmp_path, suffix, share):
        path = save(noise(200, 200, 3), tmp_path / f"cut{suffix}")
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ImageError, match=rf"cut{suffix} is (damaged or cut short|not an image)"):
            images.load_image(path)

    def test_text_renamed_png(self, tmp_path):
        path = tmp_path / "notes.png"
        path.write_text("hello, this is a shopping list")
        with pytest.raises(ImageError, match="starts like text"):
            images.load_image(path)

    def test_other_bytes_renamed_jpg(self, tmp_path):
        path = tmp_path / "weights.jpg"
        path.write_bytes(bytes(range(128, 256)))
        with pytest.raises(ImageError, match="no known image format"):
            images.load_image(path)

    def test_heic_says_what_to_do(self, tmp_path):
        path = tmp_path / "phone.heic"
        path.write_bytes(b"\x00\x00\x00\x18ftypheic" + bytes(64))
        with pytest.raises(ImageError, match=r"HEIC.*export it as JPEG"):
            images.load_image(path)

    def test_postscript_is_not_run(self, tmp_path):
        path = tmp_path / "photo.png"
        path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
        with pytest.raises(ImageError, match="not an image"):
            images.load_image(path)

    @pytest.mark.parametrize("load", [images.load_image, images.load_mask])
    def test_missing_folder_and_empty(self, tmp_path, load):
        with pytest.raises(ImageError, match="no file"):
            load(tmp_path / "absent.png")
        with pytest.raises(ImageError, match="is a folder"):
            load(tmp_path)
        (tmp_path / "empty.png").touch()
        with pytest.raises(ImageError, match="is empty"):
            load(tmp_path / "empty.png")

    @pytest.mark.parametrize("load", [images.load_image, images.load_mask, images.load_pixels])
    def test_a_file_that_may_not_be_read_is_not_called_damaged(self, tmp_path, monkeypatch, load):
        path = save(noise(5, 7), tmp_path / "photo.png")

        def locked(*_, **__):
            raise PermissionError(13, "Permission denied", str(path))

        for owner, name in ((PILImage, "open"), (Path, "is_dir")):  # the file's own rights, and its folder's
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, locked)
                with pytest.raises(ImageError, match=r"may not be read \(Permission denied\); ask for read permission"):
                    load(path)
        load(path)

    def test_a_bomb_is_refused_by_its_header(self, tmp_path):
        # Without pixel data the file would be called damaged as soon as anyone tried to decode it.
        path = write_png(tmp_path / "bomb.png", b"", width=14_000, height=12_000, bits=8, color_type=2)
        with pytest.raises(ImageError, match="12000 × 14000 = 168,000,000 pixels, above the limit of 120,000,000"):
            images.load_image(path)

    def test_a_bomb_beyond_pillow_s_own_limit(self, tmp_path):
        path = write_png(tmp_path / "bomb.png", b"", width=60_000, height=60_000, bits=8, color_type=2)
        with pytest.raises(ImageError, match="larger than Pillow opens"):
            images.load_image(path, max_pixels=10**12)

    def test_the_limit_is_the_last_size_let_in(self, tmp_path):
        path = save(noise(6, 7, 3), tmp_path / "photo.png")
        assert images.load_image(path, max_pixels=42).shape == (6, 7, 3)
        with pytest.raises(ImageError, match="above the limit of 41"):
            images.load_image(path, max_pixels=41)


class TestPixels:
    def test_transparency_is_kept_and_its_hidden_colours_too(self, tmp_path):
        stored = noise(6, 4, 4)
        stored[:2, :, 3] = 0
        np.testing.assert_array_equal(images.load_pixels(save(stored, tmp_path / "cutout.png")), stored)
        palette = save(np.zeros((3, 5), np.uint8), tmp_path / "palette.png", mode="P", transparency=0)
        assert images.load_pixels(palette).shape == (3, 5, 4) and not images.load_pixels(palette)[..., 3].any()

    @pytest.mark.parametrize("name", ["photo.png", "photo.jpg"])
    def test_without_transparency_they_are_the_image(self, tmp_path, name):
        path = save(noise(6, 4, 3), tmp_path / name, exif=exif_orientation(6))
        pixels = images.load_pixels(path)
        assert pixels.shape == (4, 6, 3)
        np.testing.assert_array_equal(pixels, images.load_image(path))

    @pytest.mark.parametrize("least_side_px, shape", [(None, (200, 300)), (101, (200, 300)), (100, (100, 150))])
    def test_a_jpeg_is_decoded_smaller_when_that_is_allowed(self, tmp_path, least_side_px, shape):
        stored = np.kron(noise(5, 6, 3), np.ones((40, 50, 1), np.uint8))
        path = save(stored, tmp_path / "photo.jpg", quality=95)
        assert images.load_pixels(path, least_side_px=least_side_px).shape == (*shape, 3)
        with pytest.raises(ImageError, match="60,000 pixels, above the limit of 59,999"):
            images.load_pixels(path, least_side_px=least_side_px, max_pixels=59_999)


class TestMasks:
    def test_grey_rgb_and_opaque_rgba_are_one_mask(self, tmp_path):
        stored = noise(5, 7)
        opaque = np.full_like(stored, 255)
        for name, pixels in {
            "grey": stored,
            "rgb": np.dstack([stored] * 3),
            "rgba": np.dstack([stored] * 3 + [opaque]),
        }.items():
            mask = images.load_mask(save(pixels, tmp_path / f"{name}.png"))
            assert mask.dtype == np.float32
            np.testing.assert_array_equal(mask, stored / np.float32(255))

    def test_1_bit_palette_and_16_bit(self, tmp_path):
        bits = noise(5, 7) > 127
        np.testing.assert_array_equal(images.load_mask(save(bits, tmp_path / "bits.png")), bits)
        palette = save(bits * np.uint8(255), tmp_path / "palette.png", mode="P")
        np.testing.assert_array_equal(images.load_mask(palette), bits)
        deep = np.array([[0, 1, 300, 65535]], dtype=np.uint16)
        np.testing.assert_allclose(images.load_mask(save(deep, tmp_path / "deep.png")), deep / 65535, rtol=1e-6)

    def test_a_jpeg_mask_that_was_saved_in_colour(self, tmp_path):
        stored = np.kron(noise(3, 3), np.ones((16, 16), np.uint8))
        mask = images.load_mask(save(np.dstack([stored] * 3), tmp_path / "mask.jpg", quality=95))
        assert np.abs(mask - stored / 255).max() < 0.03

    def test_channels_that_disagree(self, tmp_path):
        stored = np.dstack([noise(5, 7)] * 3)
        stored[2, 3, 0] ^= 64
        with pytest.raises(ImageError, match=r"in colour.*64 of 255"):
            images.load_mask(save(stored, tmp_path / "colour.png"))

    def test_alpha_over_one_colour_is_the_mask(self, tmp_path):
        alpha = noise(5, 7)
        pixels = np.dstack([np.full((5, 7, 3), 90, np.uint8), alpha])
        np.testing.assert_array_equal(images.load_mask(save(pixels, tmp_path / "alpha.png")), alpha / np.float32(255))

    def test_a_cutout_is_ambiguous_until_alpha_is_asked_for(self, tmp_path):
        image, mask = noise(5, 7, 3), ramp_mask(5, 7)
        path = images.save_cutout(image, mask, tmp_path / "cutout.png")
        with pytest.raises(ImageError, match="from_alpha=True"):
            images.load_mask(path)
        np.testing.assert_allclose(images.load_mask(path, from_alpha=True), mask, atol=0.5 / 255 + 1e-6)
        with PILImage.open(path) as saved:
            np.testing.assert_array_equal(np.asarray(saved)[..., :3], image)
        with pytest.raises(ImageError, match="holds none"):
            images.load_mask(save(image, tmp_path / "opaque.png"), from_alpha=True)

    def test_round_trip_keeps_every_8_bit_value(self, tmp_path):
        mask = (np.arange(256, dtype=np.float32) / 255).reshape(8, 32)
        path = images.save_mask(mask, tmp_path / "new folder" / "mask.png")
        np.testing.assert_array_equal(images.load_mask(path), mask)
        with PILImage.open(path) as saved:
            assert saved.mode == "L"
        assert [entry.name for entry in path.parent.iterdir()] == ["mask.png"]

    def test_rounding_is_to_the_nearest_step(self, tmp_path):
        path = images.save_mask(np.array([[0.4 / 255, 0.6 / 255, 254.6 / 255]]), tmp_path / "mask.png")
        with PILImage.open(path) as saved:
            assert np.asarray(saved).tolist() == [[0, 1, 255]]

    @pytest.mark.parametrize(
        "mask, sentence",
        [
            (np.zeros((1, 4, 4), np.float32), r"found shape \(1, 4, 4\)"),
            (np.zeros((0, 4), np.float32), r"found shape \(0, 4\)"),
            (np.full((4, 4), 255, np.uint8), "found uint8: divide"),
            (np.full((4, 4), 3.5), "take the sigmoid"),
            (np.full((4, 4), np.nan), "found nan"),
        ],
    )
    def test_what_is_no_mask_is_not_saved(self, tmp_path, mask, sentence):
        with pytest.raises(ImageError, match=sentence):
            images.save_mask(mask, tmp_path / "mask.png")
        assert not list(tmp_path.iterdir())

    def test_a_lossy_name_is_refused(self, tmp_path):
        with pytest.raises(ImageError, match=r"end it in \.png"):
            images.save_mask(ramp_mask(2, 2), tmp_path / "mask.jpg")

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = images.save_mask(ramp_mask(4, 4), tmp_path / "mask.png")
        before = path.read_bytes()

        def full_disk(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.replace", full_disk)
        with pytest.raises(ImageError, match="No space left"):
            images.save_mask(1 - ramp_mask(4, 4), path)
        assert path.read_bytes() == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["mask.png"]

    def test_a_mask_of_another_size_is_no_cutout(self, tmp_path):
        with pytest.raises(ImageError, match="The mask is 7 × 5 but its image is 5 × 7"):
            images.save_cutout(noise(5, 7, 3), ramp_mask(7, 5), tmp_path / "cutout.png")


def test_sample_photographs_are_listed_unchanged_and_small():
    listed = re.findall(
        r"^\| `(\S+)` \| scikit.* (\w{64}) \|$", (PHOTOGRAPHS / "LICENCES.md").read_text(), re.MULTILINE
    )
    files = {path.name: path for path in PHOTOGRAPHS.iterdir() if path.suffix != ".md"}
    assert dict(listed) == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert sum(path.stat().st_size for path in files.values()) < 1_500_000


@pytest.mark.parametrize(
    "name, shape",
    re.findall(r"^\| `(\S+)` \|.*\| (\d+, \d+) \|", (PHOTOGRAPHS / "LICENCES.md").read_text(), re.MULTILINE),
)
def test_sample_photographs_load_at_the_listed_size(name, shape):
    image = images.load_image(PHOTOGRAPHS / name)
    assert image.shape == (*map(int, shape.split(", ")), 3)
    assert image.std() > 20
