//! Decompresses layers into files, within limits.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    os::unix::fs::FileExt,
};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError::SkipFrame},
};

use crate::{
    digest::{Digest, Hasher},
    limits::Limits,
    manifest::Compression,
    source::Unpacked,
};

/// Unit in which zeros become holes, in bytes.
const BLOCK: usize = 4096;
const PIECE: usize = 64 * BLOCK;
/// Limit for the window of a zstd frame, which the decoder keeps in memory. `zstd --long` uses 128 MiB.
const MAX_WINDOW: u64 = 128 << 20;

#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("layer cannot be decompressed")]
    Decompress(#[source] io::Error),
    #[error("cannot write the unpacked layer")]
    Write(#[source] io::Error),
    #[error("unpacked layer has the digest {found}, but the image's config lists {wanted}")]
    DiffId { wanted: Digest, found: Digest },
    #[error("the image's layers unpack to more than {0} bytes")]
    Stream(u64),
    #[error("the image's layers unpack to more than {0} bytes that are not zero")]
    Stored(u64),
    #[error("a layer unpacks to more than {0} times its size")]
    Ratio(u64),
}

/// Unpacks the layers of one image, which share their limits.
#[derive(Debug)]
pub struct Unpacker {
    limits: Limits,
    stream: u64,
    stored: u64,
}

impl Unpacker {
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        Self {
            limits: limits.clone(),
            stream: limits.stream,
            stored: limits.stored,
        }
    }

    /// Decompresses `blob` into the empty file `out` and checks the digest of the result. Blocks of zeros become holes.
    ///
    /// # Errors
    /// Returns an error if the blob is malformed, exceeds a limit, or does not have the digest `diff_id`.
    pub fn unpack(
        &mut self,
        blob: File,
        compression: Compression,
        diff_id: &Digest,
        out: File,
    ) -> Result<Unpacked, UnpackError> {
        let packed = blob.metadata().map_err(UnpackError::Decompress)?.len();
        let allowance = packed.saturating_mul(self.limits.ratio);
        let with_zeros = allowance.max(self.limits.zeros_free);
        let allowance = allowance.max(self.limits.ratio_free);
        let blob = BufReader::with_capacity(PIECE, blob);
        let mut reader: Box<dyn Read> = match compression {
            Compression::None => Box::new(blob),
            Compression::Gzip => Box::new(MultiGzDecoder::new(blob)),
            Compression::Zstd => Box::new(Zstd::new(blob)),
        };
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; PIECE];
        let (mut offset, mut stored) = (0, 0);
        loop {
            let len = fill(&mut reader, &mut buffer).map_err(UnpackError::Decompress)?;
            let piece = &buffer[..len];
            let too_long = UnpackError::Stream(self.limits.stream);
            self.stream = self.stream.checked_sub(len as u64).ok_or(too_long)?;
            if offset + len as u64 > with_zeros {
                return Err(UnpackError::Ratio(self.limits.ratio));
            }
            hasher.update(piece);
            for run in runs(piece) {
                let bytes = &piece[run.clone()];
                stored += bytes.len() as u64;
                let too_large = UnpackError::Stored(self.limits.stored);
                self.stored = (self.stored.checked_sub(bytes.len() as u64)).ok_or(too_large)?;
                if stored > allowance {
                    return Err(UnpackError::Ratio(self.limits.ratio));
                }
                let at = offset + run.start as u64;
                out.write_all_at(bytes, at).map_err(UnpackError::Write)?;
            }
            offset += len as u64;
            if len < PIECE {
                break;
            }
        }
        out.set_len(offset).map_err(UnpackError::Write)?;
        let found = hasher.finish();
        if found != *diff_id {
            let wanted = *diff_id;
            return Err(UnpackError::DiffId { wanted, found });
        }
        Unpacked::new(out).map_err(UnpackError::Write)
    }
}

/// Reads until the buffer is full or the stream ends.
fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match reader.read(&mut buffer[len..])? {
            0 => break,
            more => len += more,
        }
    }
    Ok(len)
}

/// The parts of a piece that are not blocks of zeros.
fn runs(piece: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (index, block) in piece.chunks(BLOCK).enumerate() {
        if block.iter().all(|byte| *byte == 0) {
            continue;
        }
        let begin = index * BLOCK;
        match runs.last_mut() {
            Some(run) if run.end == begin => run.end += block.len(),
            _ => runs.push(begin..begin + block.len()),
        }
    }
    runs
}

/// Decodes consecutive zstd frames. Skips skippable frames, in which some tools store indexes.
struct Zstd<R> {
    source: R,
    decoder: FrameDecoder,
    is_inside: bool,
}

impl<R: BufRead> Zstd<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MAX_WINDOW);
        Self {
            source,
            decoder,
            is_inside: false,
        }
    }

    /// Reads the header of the next frame. Returns false at the end of the source.
    fn open(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.source) {
                Ok(()) => {
                    self.is_inside = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(SkipFrame { length, .. })) => {
                    let mut frame = self.source.by_ref().take(u64::from(length));
                    if io::copy(&mut frame, &mut io::sink())? < u64::from(length) {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.is_inside && self.decoder.can_collect() > 0 {
                return self.decoder.read(buffer);
            }
            if self.is_inside && !self.decoder.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                (self.decoder.decode_blocks(&mut self.source, one)).map_err(io::Error::other)?;
                continue;
            }
            self.is_inside = false;
            if !self.open()? {
                return Ok(0);
            }
        }
    }
}
