"""Small values shared by every floor above: what kind of data a sample is."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from sqlstream.errors import ConfigError

SAMPLE_FIELDS = ("__sample_key__", "__row__", "__epoch__")
"""Fields that every sample gets beside the columns of its row; no column may have such a name."""


class DataSampleType(StrEnum):
    """The main kind of data in a sample; for a directory source it says which extension makes a sample.

    Names and meaning are those of `sds`.
    """

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"
    TEXT = "text"
    IMAGE_LATENT = "image_latent"
    VIDEO_LATENT = "video_latent"
    AUDIO_LATENT = "audio_latent"
    TEXT_LATENT = "text_latent"

    @classmethod
    def from_str(cls, value: str) -> DataSampleType:
        """Return the type of that name, in any case, with `-` or `_`.

        Raises:
            ConfigError: No such type.

        Example:
            >>> DataSampleType.from_str("Video-Latent")
            <DataSampleType.VIDEO_LATENT: 'video_latent'>
        """
        try:
            return cls(str(value).strip().lower().replace("-", "_"))
        except ValueError:
            known = ", ".join(cls)
            raise ConfigError(f"data_type={value!r} is unknown: give one of {known}") from None

    @property
    def extensions(self) -> frozenset[str]:
        """Extensions of this type's files: lower case, without a dot."""
        return EXTENSIONS[self]


_LATENTS = frozenset("pkl pt ckpt npy npz h5 hdf5".split())

EXTENSIONS: Mapping[DataSampleType, frozenset[str]] = {
    # What Pillow 12 reads (Image.registered_extensions()), written down: the index must not depend on the Pillow at hand.
    # Without the few that other types need (mpeg, pdf, h5), which Pillow stubs or only writes.
    DataSampleType.IMAGE: frozenset(
        """
        apng avif avifs blp bmp bufr bw cur dcx dds dib emf eps fit fits flc fli ftc ftu gbr gif grib hdf icb icns ico
        iim im j2c j2k jfif jp2 jpc jpe jpeg jpf jpg jpx mic mpo msp palm pbm pcd pcx pfm pgm png pnm ppm ps psd pxr qoi
        ras rgb rgba sgi tga tif tiff vda vst webp wmf xbm xpm
        """.split()
    ),
    DataSampleType.VIDEO: frozenset("avi mp4 webm mov mkv m4v mpg mpeg wmv flv 3gp 3g2".split()),
    DataSampleType.AUDIO: frozenset("mp3 wav flac aac ogg m4a".split()),
    DataSampleType.TEXT: frozenset("txt json csv xml md html pdf docx rtf".split()),
    DataSampleType.IMAGE_LATENT: _LATENTS,
    DataSampleType.VIDEO_LATENT: _LATENTS,
    DataSampleType.AUDIO_LATENT: _LATENTS,
    DataSampleType.TEXT_LATENT: _LATENTS,
}
"""Extensions of each type, as `sds` has them."""
