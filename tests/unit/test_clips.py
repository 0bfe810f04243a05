"""Videos in records and files: what is read of them, and every bad one by name."""

import os
import sys
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from sample_sets import PixelRule, png, talk, write_jsonl, write_tokenizer

from refusals import refused
from trimtab.errors import ConfigError, ImageError
from trimtab.models.images import asked as clips
from trimtab.samples.encode import ConversationEncoder
from trimtab.samples.media import read_clip, read_frames
from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import Slot, read_conversation
from trimtab.samples.size import size_samples
from trimtab.samples.tokens import read_tokenizer
from trimtab.specs import Clip, ClipCounts, ImageCounts
from yaml_tables import read_table

FACTS = {"width": 64, "height": 48, "fps": 10, "num_frames": 20}
CLIP = Clip(width=64, height=48, num_frames=20, fps=10.0)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|image_pad|>{% elif c.type == 'video' %}<|video_pad|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class EveryTenth:
    """One frame in ten, three tokens and a time each; a single frame is refused."""

    asked: str = os.devnull  # a file with one line a question, from whatever process

    def prepare(self, clips):
        with open(self.asked, "a") as file:
            file.write(f"{len([*clips])} clips\n")

    def count_clip(self, clip):
        if clip.num_frames == 1:
            raise ImageError("a video of one frame: give more")
        num = -(-clip.num_frames // 10)
        text = "".join(f"<{i}.0 seconds><|vision_start|><|video_pad|><|vision_end|>" for i in range(num))
        image = ImageCounts(
            patches=12 * num, tokens=3 * num, tiles=num, patches_sq=144 * num, patches_windowed=144 * num, text=text
        )
        return ClipCounts(image=image, placeholder="<|video_pad|>", soft="<|video_pad|>")


def part(**fields):
    return [{"role": "user", "content": [{"type": "video", **fields}, {"type": "text", "text": "what"}]}]


@pytest.mark.parametrize(("record", "sources"), read_table("records", "videos"))
def test_every_spelling_of_a_video_is_read(record, sources):
    conversation = read_conversation(record)
    found = [list(x.source) if isinstance(x.source, tuple) else x.source for x in conversation.videos]
    assert found == sources
    assert sum(message.content.count(Slot.VIDEO) for message in conversation.messages) == len(sources)


@pytest.mark.parametrize(
    ("facts", "clip"),
    [
        (FACTS, CLIP),
        ({"width": 64, "height": 48, "video_fps": "10", "duration": 2.04}, CLIP),
        ({**FACTS, "fps": 0}, None),  # not believed: the file's header is read
        ({"width": 64, "height": 48, "fps": 10}, None),
    ],
)
def test_what_a_record_says_of_its_file_is_believed_if_it_is_all(facts, clip):
    (video,) = read_conversation({"video": "a.mp4", **facts, "conversations": talk("<video>")}).videos
    assert video.clip == clip


def rows_of(folder):
    """Records with videos whose size is known without PyAV; then each that is bad, with its kind and reason."""
    for name in ("a.png", "b.png"):
        (folder / name).write_bytes(png(64, 48))
    (folder / "c.png").write_bytes(png(40, 40))
    (folder / "a.mp4").write_bytes(b"not read")
    (folder / "folder.mp4").mkdir()
    good = [
        {"id": "facts", "video": "a.mp4", **FACTS, "conversations": talk("<video>\nwhat", "a cat")},
        {"id": "frames", "messages": part(video=["a.png", "b.png"])},
        {"id": "both", "image": "c.png", "video": "a.mp4", **FACTS, "conversations": talk("<image> or <video>", "no")},
        {"id": "text", "conversations": talk("what", "a cat")},
    ]
    marked = {**FACTS, "conversations": talk("<video>")}
    bad = [
        ({"video": "gone.mp4", **marked}, "path", "video gone.mp4 cannot be opened"),
        ({"video": "../a.mp4", **marked}, "path", "lies outside the media folder"),
        ({"video": "https://x.org/a.mp4", **marked}, "path", "is on the network"),
        ({"video": "folder.mp4", **marked}, "video", "is a folder or a device"),
        ({"video": "a.mp4", **marked, "num_frames": 1}, "video", "a video of one frame"),
        ({"messages": part(video=["a.png", "c.png"])}, "video", "its frames are 40 x 40 and 64 x 48 pixels"),
        ({"messages": part(video=["a.png", "gone.png"])}, "path", "image gone.png cannot be opened"),
        ({"messages": part(video="data:video/mp4;base64,!!")}, "video", "a data: URL is not base64"),
        ({"video": "a.mp4", **FACTS, "conversations": talk("<video>", "the <|video_pad|>")}, "placeholder", "2 times"),
    ]
    return good, bad


def test_videos_are_sized_and_encoded_alike_and_every_bad_one_is_named(tmp_path):
    good, bad = rows_of(tmp_path)
    folder, rule = write_tokenizer(tmp_path / "model", CHATML), EveryTenth(str(tmp_path / "asked"))
    mixed = [row for pair in zip(good * 3, [row for row, _, _ in bad], strict=False) for row in pair]
    mixed = [{**row, "id": f"{number}"} for number, row in enumerate(mixed)]
    data = write_jsonl(tmp_path / "data.jsonl", mixed)
    result = size_samples(data, image_rule=PixelRule(), clip_rule=rule, tokenizer=folder, on_bad="skip")
    assert len(result.table) + len(result.bad) == len(mixed), "nothing is lost"
    assert [(x.line, x.kind) for x in result.bad] == [(2 * i + 2, kind) for i, (_, kind, _) in enumerate(bad)]
    for found, (_, _, reason) in zip(result.bad, bad, strict=True):
        assert reason in found.reason
    assert len((tmp_path / "asked").read_text().splitlines()) == 1, "one question for a chunk"
    encoder = ConversationEncoder(read_tokenizer(folder))
    counts = [
        ([], [CLIP]),
        ([], [Clip(width=64, height=48, num_frames=2, fps=None, listed=True)]),
        ([PixelRule().count(40, 40)], [CLIP]),
        ([], []),
    ]
    for row, record in enumerate(good):
        images, clips = counts[row]
        videos = [rule.count_clip(clip) for clip in clips]
        encoded = encoder.encode(read_conversation(record), images, videos)
        assert len(encoded.input_ids) == result.table.num_tokens[row]
        assert result.table.num_patches[row] == sum(x.patches for x in [*images, *(v.image for v in videos)])
        assert result.table.num_images[row] == len(images) + len(clips)
        assert encoded.learnt.any() == (row != 1)


def test_without_a_tokenizer_or_the_processors_files_that_is_said(tmp_path):
    good, _ = rows_of(tmp_path)
    data = write_jsonl(tmp_path / "data.jsonl", good)
    result = size_samples(data, image_rule=PixelRule(), clip_rule=EveryTenth(), tokenizer=None)
    assert not result.table.tokens_exact
    result = size_samples(data, image_rule=PixelRule(), tokenizer=None, on_bad="skip")
    assert [(x.id, x.kind) for x in result.bad] == [("facts", "video"), ("frames", "video"), ("both", "video")]
    assert "name the model's folder" in result.bad[0].reason


def test_a_header_is_read_by_pyav_which_may_be_missing(tmp_path, monkeypatch):
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x18ftypmp42 and nothing more")
    monkeypatch.setitem(sys.modules, "av", None)
    with (tmp_path / "a.mp4").open("rb") as file, refused(ConfigError):
        read_clip(file, "a.mp4")


def test_files_of_every_container_are_read_and_damaged_ones_are_bad(tmp_path):
    av = pytest.importorskip("av", reason="PyAV is not installed")
    for suffix, codec in ((".mp4", "mpeg4"), (".webm", "libvpx"), (".mkv", "mpeg4")):
        path = tmp_path / f"a{suffix}"
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for number in range(20):
                frame = av.VideoFrame(64, 48, "yuv420p")
                for plane in frame.planes:
                    plane.update(bytes([12 * number] * plane.buffer_size))
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        with path.open("rb") as file:
            assert read_clip(file, "a") == CLIP
        with path.open("rb") as file:
            frames = read_frames(file, "a", [0, 7, 7, 19])
        assert frames.shape == (4, 48, 64, 3)
        assert (frames[1] == frames[2]).all()
        assert frames[3].mean() > frames[1].mean() + 40, "later frames are brighter"
        with path.open("rb") as file, refused(BadRecordError, "20"):
            read_frames(file, "a", [3, 20])
        whole = path.read_bytes()
        for damaged in (b"", whole[:40], b"x" * len(whole), whole[: len(whole) // 2] + bytes(len(whole) // 2)):
            path.write_bytes(damaged)
            try:
                with path.open("rb") as file:
                    clip = read_clip(file, "a")
                with path.open("rb") as file:
                    read_frames(file, "a", range(clip.num_frames))
            except BadRecordError:  # and nothing else
                continue
            assert damaged[:1] != b"x"


def test_a_frame_of_another_size_than_the_header_says_is_bad(tmp_path):
    av = pytest.importorskip("av", reason="PyAV is not installed")
    from trimtab.samples.media import read_frames
    from trimtab.samples.problems import BadRecordError

    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for number, width in enumerate((64, 32)):
            codec = av.CodecContext.create("mjpeg", "w")
            codec.width, codec.height, codec.pix_fmt, codec.time_base = width, 48, "yuvj420p", Fraction(1, 10)
            frame = av.VideoFrame(width, 48, "yuvj420p")
            frame.pts = number
            for packet in codec.encode(frame):
                packet.stream = stream
                container.mux(packet)
    with (tmp_path / "a.mkv").open("rb") as file, refused(BadRecordError, "1", "32", "48"):
        read_frames(file, "a", [0, 1])


def test_clips_are_asked_for_once_and_refused_in_the_processors_words(monkeypatch):
    """The processor's answer is a row of counts, or its own words; windows hold 4 x 4 squares of 2 x 2 patches."""
    answer = {"rows": [[128, 32, 2, 8192, 1, 8, 16], "give more frames"], "texts": ["<v>"], "clip_token": "<v>"}
    asked = []

    def ask(question, what):
        asked.append(what)
        return {"patch_size": 14, "extra_rows": 0} if what == "images" else {**answer, "soft": "<v>"}

    rule = clips.AskedClips(question='{"config": {}}', windows=(2, 4))
    monkeypatch.setattr(clips, "is_installed", lambda: False)
    with refused(ConfigError):
        rule.prepare([CLIP])
    monkeypatch.setattr(clips, "is_installed", lambda: True)
    monkeypatch.setattr(clips, "ask", ask)
    short = replace(CLIP, num_frames=1)
    rule.prepare([CLIP, short, CLIP])
    rule.prepare([CLIP])
    assert asked == ["images", "clips"]
    with refused(ImageError, "1", "64", "48"):
        rule.count_clip(short)
    # two tiles of 8 x 16 patches are two windows each, of 64 patches that see one another
    answer["rows"] = [[256, 64, 2, 32768, 1, 8, 16]]
    assert rule.count_clip(replace(CLIP, num_frames=4)).image.patches_windowed == 2 * 2 * 64**2
    assert rule.count_clip(CLIP).image.patches_windowed == 8192  # whose patches are no grid: as it was told
