"""Finding the two folders of a data set and pairing their files: every layout, every name, nothing in silence."""

import os
import unicodedata

import pytest

from lumen_lab.datasets import find_pairs
from lumen_lab.datasets.pairing import PairListing, list_pictures, pairing_key
from lumen_lab.errors import DatasetError

STEMS = ("a", "b", "c")


def touch(root, *names):
    """Empty files: pairing reads names alone."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def names(listing):
    return [pair.name for pair in listing.pairs]


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        ("im", "gt"),
        ("images", "masks"),
        ("image", "mask"),
        ("Image", "Mask"),
        ("img", "GT"),
        ("Imgs", "gts"),
        ("images", "ground_truth_mask"),
        ("images", "Ground Truth"),
        ("DUTS-TE-Image", "DUTS-TE-Mask"),
        ("DUT-OMRON-image", "pixelwiseGT-new-PNG"),
        ("DUT-OMRON-image/DUT-OMRON-image", "DUT-OMRON-gt-pixelwise.zip/pixelwiseGT-new-PNG"),
        ("HRSOD_test", "HRSOD_test_mask"),
        ("images_test", "masks_test"),
        ("ECSSD/images", "ECSSD/ground_truth_mask"),
        ("image_sets/im", "image_sets/gt"),
        (".", "masks"),
    ],
)
def test_known_layouts_are_found(tmp_path, images, masks):
    touch(tmp_path, *(f"{images}/{stem}.jpg" for stem in STEMS), *(f"{masks}/{stem}.png" for stem in STEMS))
    touch(tmp_path, "notes/readme.txt")
    listing = find_pairs(tmp_path)
    assert names(listing) == list(STEMS)
    assert all((tmp_path / pair.image).is_file() and (tmp_path / pair.mask).is_file() for pair in listing.pairs)
    assert [pair.mask for pair in listing.pairs] == [f"{masks}/{stem}.png" for stem in STEMS]
    assert (listing.found_images, listing.found_masks) == (3, 3)


@pytest.mark.parametrize("folder", ["Imgs", "."])
def test_one_folder_of_photographs_and_masks(tmp_path, folder):
    touch(tmp_path, *(f"{folder}/{stem}.JPG" for stem in STEMS), *(f"{folder}/{stem}.png" for stem in STEMS))
    listing = find_pairs(tmp_path)
    assert names(listing) == list(STEMS)
    assert {pair.image[-4:] + pair.mask[-4:] for pair in listing.pairs} == {".JPG.png"}
    assert find_pairs(tmp_path, images=folder) == listing


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("1#Accessories#1#Bag#2339506821_83cf9f1d22_o.jpg", "1#Accessories#1#Bag#2339506821_83cf9f1d22_o.png"),
        ("two words.JPEG", "two words.PNG"),
        ("v1.2.final.webp", "v1.2.final.bmp"),
        ("IMG_01.JPG", "img_01.png"),
        ("Straße 東京.tif", "STRAßE 東京.gif"),
        (unicodedata.normalize("NFD", "Äpfel é.png"), unicodedata.normalize("NFC", "Äpfel é.png")),
        ("deep/er/x.png", "Deep/er/x.png"),
    ],
)
def test_names_that_belong_together(tmp_path, image, mask):
    touch(tmp_path, f"im/{image}", f"gt/{mask}")
    (pair,) = find_pairs(tmp_path).pairs
    assert (pair.image, pair.mask) == (f"im/{image}", f"gt/{mask}")
    assert pair.name == os.path.splitext(image)[0]
    assert pairing_key(pair.name) in list_pictures(tmp_path / "gt")[0]


@pytest.mark.parametrize(("image", "mask"), [("1.jpg", "01.png"), ("a.b.jpg", "a.png"), ("x.jpg", "x_mask.png")])
def test_names_that_do_not(tmp_path, image, mask):
    touch(tmp_path, f"im/{image}", f"gt/{mask}")
    with pytest.raises(DatasetError, match=f"0 paired; 1 image without a mask: im/{image}; 1 mask .*: gt/{mask}"):
        find_pairs(tmp_path)


def test_subfolders_are_mirrored_so_that_equal_stems_stay_apart(tmp_path):
    touch(tmp_path, "images/day/1.jpg", "images/night/1.jpg", "masks/night/1.png", "masks/day/1.png")
    listing = find_pairs(tmp_path)
    assert [(pair.name, pair.mask) for pair in listing.pairs] == [
        ("day/1", "masks/day/1.png"),
        ("night/1", "masks/night/1.png"),
    ]


def test_a_folder_that_only_wraps_a_side_is_looked_through(tmp_path):
    touch(tmp_path, "imgs/pascal/1.jpg", "imgs/pascal/2.jpg", "flat/1.png", "flat/2.png")
    assert names(find_pairs(tmp_path, images="imgs", masks="flat")) == ["1", "2"]
    touch(tmp_path, "imgs/ft/3.jpg")
    with pytest.raises(DatasetError, match="0 paired; 3 images without a mask: imgs/ft/3.jpg, imgs/pascal/1.jpg"):
        find_pairs(tmp_path, images="imgs", masks="flat")


def test_orphans_are_refused_with_counts_and_names_unless_asked_for(tmp_path):
    touch(tmp_path, *(f"im/{k:02d}.jpg" for k in range(10)), "gt/00.png", "gt/03.png", "gt/zz.png")
    refused = (
        r"10 images \(im\) and 3 masks \(gt\) found, 2 paired; 8 images without a mask: im/01.jpg, im/02.jpg, "
        r"im/04.jpg, im/05.jpg, im/06.jpg and 3 more; 1 mask without an image: gt/zz.png; 0 other files ignored\. "
        'Complete .* on_orphans="report"'
    )
    with pytest.raises(DatasetError, match=refused):
        find_pairs(tmp_path)
    listing = find_pairs(tmp_path, on_orphans="report")
    assert names(listing) == ["00", "03"]
    assert len(listing.orphan_images) == 8
    assert listing.orphan_masks == ("gt/zz.png",)
    with pytest.raises(DatasetError, match="'skip'"):
        find_pairs(tmp_path, on_orphans="skip")


@pytest.mark.parametrize("lone", ["im/b.jpg", "gt/b.png"])
def test_an_orphan_on_either_side_is_enough(tmp_path, lone):
    touch(tmp_path, "im/a.jpg", "gt/a.png", lone)
    with pytest.raises(DatasetError, match=f"1 paired; 1 .* without an? .*: {lone}"):
        find_pairs(tmp_path)


def test_every_file_is_paired_an_orphan_or_ignored(tmp_path):
    touch(tmp_path, "im/a.jpg", "im/._a.jpg", "im/Thumbs.db", "im/b.jpg", "im/__MACOSX/b.jpg", "im/.cache/c.jpg")
    touch(tmp_path, "gt/a.png", "gt/._a.png", "gt/note.txt")
    listing = find_pairs(tmp_path, on_orphans="report")
    accounted = {name for pair in listing.pairs for name in (pair.image, pair.mask)}
    accounted |= {*listing.orphan_images, *listing.orphan_masks, *listing.ignored}
    assert accounted == {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert (listing.paired, listing.orphan_images, len(listing.ignored)) == (1, ("im/b.jpg",), 6)


@pytest.mark.parametrize("twin", ["a.PNG", "A.jpg", "a.jpeg"])
def test_two_files_of_one_name_are_refused_by_name(tmp_path, twin):
    touch(tmp_path, "im/a.jpg", f"im/{twin}", "gt/a.png")
    if len(list((tmp_path / "im").iterdir())) < 2:
        pytest.skip("this file system does not tell A.jpg from a.jpg")
    with pytest.raises(DatasetError, match="two pictures of one name") as refused:
        find_pairs(tmp_path, on_orphans="report")
    assert "a.jpg" in str(refused.value)
    assert twin in str(refused.value)


def test_several_sets_are_named_and_one_of_them_is_opened(tmp_path):
    for part in ("DIS-TE1", "DIS-TE2", "DIS-VD"):
        touch(tmp_path, f"{part}/im/{part}.jpg", f"{part}/gt/{part}.png")
    with pytest.raises(DatasetError, match="3 sets .DIS-TE1/im with DIS-TE1/gt; DIS-TE2/im with"):
        find_pairs(tmp_path)
    assert names(find_pairs(tmp_path / "DIS-TE2")) == ["DIS-TE2"]
    assert find_pairs(tmp_path, images="DIS-VD/im", masks="DIS-VD/gt").pairs[0].mask == "DIS-VD/gt/DIS-VD.png"


def test_folders_may_be_named_both_or_one(tmp_path):
    touch(tmp_path, "photos/a.jpg", "labels/a.png", "gt/a.png", "gt_fine/a.png")
    with pytest.raises(DatasetError, match="found .'gt', 'gt_fine', 'labels', 'photos'.*Give images= and masks="):
        find_pairs(tmp_path)
    both = find_pairs(tmp_path, images="photos", masks=tmp_path / "labels")
    assert (both.images, both.masks, both.paired) == ("photos", "labels", 1)
    with pytest.raises(DatasetError, match="images= was given; .'gt', 'gt_fine'. could be the masks"):
        find_pairs(tmp_path, images="photos")
    (tmp_path / "gt_fine").rename(tmp_path / "kept")
    assert find_pairs(tmp_path, images="photos").masks == "gt"
    with pytest.raises(DatasetError, match="no folder .*imgs"):
        find_pairs(tmp_path, images="imgs", masks="gt")


def test_folders_elsewhere_are_shown_whole(tmp_path):
    touch(tmp_path, "here/im/a.jpg", "there/m/a.png")
    (pair,) = find_pairs(tmp_path / "here", images="im", masks=tmp_path / "there" / "m").pairs
    assert (pair.image, pair.mask) == ("im/a.jpg", str(tmp_path / "there" / "m" / "a.png"))


def test_a_root_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="nothing is there"):
        find_pairs(tmp_path / "gone")
    with pytest.raises(DatasetError, match="a file is there"):
        find_pairs(touch(tmp_path, "x.zip") / "x.zip")
    with pytest.raises(DatasetError, match="no folders"):
        find_pairs(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="making links needs a privilege on Windows")
def test_links_are_followed_but_not_in_circles(tmp_path):
    touch(tmp_path, "store/a.jpg", "set/gt/part/a.png")
    (tmp_path / "set" / "im").mkdir()
    (tmp_path / "set" / "im" / "part").symlink_to(tmp_path / "store")
    (tmp_path / "store" / "again").symlink_to(tmp_path / "store")
    assert names(find_pairs(tmp_path / "set")) == ["part/a"]


def test_a_listing_is_shown_saved_and_read_again(tmp_path):
    touch(tmp_path, "im/<b>.jpg", "im/a.jpg", "gt/a.png", "gt/Thumbs.db")
    listing = find_pairs(tmp_path, on_orphans="report")
    assert PairListing.load(listing.save(tmp_path / "listing.json")) == listing
    rows = listing.rows()
    assert [(row["files"], row["found"], row["orphans"]) for row in rows] == [
        ("images", 2, 1),
        ("masks", 1, 0),
        ("ignored", 1, None),
    ]
    assert "im/&lt;b&gt;.jpg" in listing._repr_html_()


@pytest.mark.skipif(os.name == "nt", reason="making links needs a privilege on Windows")
def test_folders_that_link_to_each_other_are_entered_once(tmp_path):
    parts = [f"part{k}" for k in range(8)]  # followed by every way there is, they would make 8! paths
    touch(tmp_path, *(f"im/{part}/x.jpg" for part in parts), *(f"gt/{part}/x.png" for part in parts))
    for part in parts:
        for other in set(parts) - {part}:
            (tmp_path / "im" / part / other).symlink_to(f"../{other}")
    assert names(find_pairs(tmp_path)) == [f"{part}/x" for part in parts]


@pytest.mark.skipif(os.name == "nt", reason="making links needs a privilege on Windows")
def test_a_folder_below_goes_by_its_own_name_and_one_elsewhere_by_its_link(tmp_path):
    touch(tmp_path, "store/x.jpg", "store/more/y.jpg", "set/im/deep/z.jpg")
    (tmp_path / "set" / "im" / "a").symlink_to("deep")
    (tmp_path / "set" / "im" / "b").symlink_to(tmp_path / "store")
    (tmp_path / "set" / "im" / "c").symlink_to(tmp_path / "store" / "more")
    assert sorted(list_pictures(tmp_path / "set" / "im")[0].values()) == ["b/x.jpg", "c/y.jpg", "deep/z.jpg"]


@pytest.fixture
def close(monkeypatch):
    """Takes from this process the permission to list a folder; taken on disk, a privileged user would not notice."""

    def refusing(listing, folder):
        def listed(path="."):
            if os.fspath(path) == str(folder):
                raise PermissionError(13, "Permission denied", str(folder))
            return listing(path)

        return listed

    def closing(folder):
        for name in ("scandir", "listdir"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name), folder))

    return closing


@pytest.mark.parametrize("closed", ["other", "secret_masks"])
def test_a_closed_folder_beside_the_two_does_not_matter(tmp_path, close, closed):
    touch(tmp_path, "im/a.jpg", "gt/a.png", f"{closed}/b.png")
    close(tmp_path / closed)
    assert names(find_pairs(tmp_path)) == ["a"]


@pytest.mark.parametrize(
    ("masks", "closed", "sentence"),
    [
        ("gt", "gt", "gt cannot be listed .Permission denied.; ask for permission"),
        ("gt", "im", "im cannot be listed"),
        ("gt", ".", "cannot be listed"),
        ("im_mask", "im_mask", "no permission to list im_mask"),
    ],
)
def test_a_closed_folder_that_is_needed_is_named(tmp_path, close, masks, closed, sentence):
    touch(tmp_path, "im/a.jpg", f"{masks}/a.png")
    close(tmp_path / closed)
    with pytest.raises(DatasetError, match=sentence):
        find_pairs(tmp_path)


def test_a_closed_folder_that_was_named_is_refused(tmp_path, close, monkeypatch):
    touch(tmp_path, "photos/a.jpg", "labels/b.png")
    close(tmp_path / "labels")
    with pytest.raises(DatasetError, match="labels cannot be listed"):
        find_pairs(tmp_path, images="photos", masks="labels")
    with pytest.raises(DatasetError, match="labels cannot be listed|none could be the images"):
        find_pairs(tmp_path, masks="labels")
    seen = os.stat

    def hidden(path, **options):
        if os.fspath(path).endswith("labels"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return seen(path, **options)

    monkeypatch.setattr(os, "stat", hidden)
    with pytest.raises(DatasetError, match="labels cannot be listed .Permission denied"):
        find_pairs(tmp_path, images="photos", masks="labels")
