"""Clips with their sound, and one of two captions with its embedding."""

from __future__ import annotations

from pathlib import Path

from small_data import caption, run, write_embedding, write_index, write_video
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset
from sqlstream.transforms import presets
from sqlstream.transforms.collate import collate


def main(directory: Path) -> None:
    """Make 4 videos with sound, captions and embeddings; stream them."""
    numbers = range(4)
    captions = {"short": [f"number {n}" for n in numbers], "long": [caption(n) for n in numbers]}
    embeddings = {
        length: [write_embedding(directory / length / f"{n}.npz", texts[n]) for n in numbers]
        for length, texts in captions.items()
    }
    index = write_index(
        directory,
        data_id=[f"video-{n}" for n in numbers],
        url=[write_video(directory / "videos" / f"{n}.mp4", n, with_sound=True) for n in numbers],
        duration_s=[2.0] * 4,
        fps=[24.0] * 4,
        short_caption=captions["short"],
        long_caption=captions["long"],
        short_embedding=embeddings["short"],
        long_embedding=embeddings["long"],
    )
    dataset = StreamingDataset(
        str(index),
        str(directory / "cache"),
        columns_to_download=["url", "short_embedding", "long_embedding"],
        index_col_name="data_id",
        shuffle_seed=1,
        transforms=[
            *presets.create_standard_joint_video_audio_pipeline(
                video_field="url",
                num_frames=12,
                resolution=(64, 64),
                decode_kwargs={"framerate": 12.0, "duration_field": "duration_s", "framerate_field": "fps"},
                target_audio_sr=16000,
            ),
            presets.TextEmbLoaderTransform("short_embedding", num_tokens=8),
            presets.TextEmbLoaderTransform("long_embedding", num_tokens=8),
            presets.TextEmbSamplingTransform(
                input_text_fields=["short_caption", "long_caption"],
                input_text_emb_fields=["short_embedding", "long_embedding"],
                probabilities=[0.5, 0.5],
                output_text_field="caption",
                output_text_emb_field="caption_embedding",
            ),
            presets.EnsureFieldsTransform(["video", "audio", "caption", "caption_embedding"], drop_others=True),
        ],
    )
    for batch in DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=collate):
        print(batch["video"].shape, batch["audio"].shape, batch["caption_embedding"].shape, batch["caption"])


if __name__ == "__main__":
    run(main)
