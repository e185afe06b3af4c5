//! Makes a memory file from its diff.

use std::{
    fs::{self, File},
    io::{self, BufReader, Seek, SeekFrom},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Instant,
};

use model::template_file::MEMORY;
use sha2::{Digest, Sha256};

use super::{BLOCK, DRAFTS, base_is_missing, create, cure, part, sum_of_memory};
use crate::{
    account::{Account, Allowance},
    durable::remove_file,
    error::is_full,
    memory_diff::{self, CHUNK, Header, is_zero},
};

/// Makes the memory files of templates that are stored as diffs.
#[derive(Clone, Debug)]
pub struct Restorer {
    /// The directory of images, which contains the bases.
    pub images: PathBuf,
    /// The memory file is charged to this account while it is written.
    pub account: Account,
    pub allowance: Allowance,
}

impl Restorer {
    /// Makes the memory file of the template in `dir`, if it is stored as a diff and has no memory file. One of several
    /// concurrent callers makes it, and the others wait.
    ///
    /// # Errors
    /// Returns an error if there is no room, a file cannot be read or written, or the memory's checksum differs from
    /// the manifest. No memory file is left then.
    pub fn restore(&self, dir: &Path) -> io::Result<()> {
        let path = dir.join(memory_diff::NAME);
        let mut diff = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            opened => opened?,
        };
        let memory = dir.join(MEMORY);
        if memory.exists() {
            return Ok(());
        }
        diff.lock()?;
        if memory.exists() {
            return Ok(());
        }
        let begun = Instant::now();
        let draft = dir.join(DRAFTS[1]);
        let made = self.make(dir, &mut diff, &draft).map_err(|e| {
            let _ = remove_file(&draft);
            if is_full(&e) {
                e
            } else {
                io::Error::new(e.kind(), cure(&path, &e))
            }
        });
        made.and_then(|()| fs::rename(&draft, &memory))?;
        tracing::info!(
            dir = %dir.display(),
            took_ms = begun.elapsed().as_millis(),
            "made a template's memory from its diff"
        );
        Ok(())
    }

    fn make(&self, dir: &Path, diff: &mut File, draft: &Path) -> io::Result<()> {
        diff.seek(SeekFrom::Start(0))?;
        let header = Header::read(diff)?;
        let room = self
            .account
            .take_on(dir, header.loaded_bytes, self.allowance)
            .map_err(|e| {
                io::Error::new(e.kind(), format!("no disk space for its memory file: {e}"))
            })?;
        let base = header
            .base
            .map(|base| self.images.join(model::hex(&base)).join(MEMORY));
        let base = base.map(|path| {
            File::open(&path).map_err(|e| {
                let base = path.parent().unwrap_or(&path);
                io::Error::new(e.kind(), format!("{e}; {}", base_is_missing(base)))
            })
        });
        let to = create(draft)?;
        to.set_len(header.length)?;
        let sum = unpack_all(diff, &header, base.transpose()?.as_ref(), |at, memory| {
            write_blocks(&to, at, memory)
        })?;
        drop(room);
        if sum == sum_of_memory(dir)? {
            Ok(())
        } else {
            Err(io::Error::other(
                "the checksum of the memory made from it differs from the manifest, so it or its base is damaged",
            ))
        }
    }
}

/// Writes the blocks that are not zero. The others remain holes.
pub(crate) fn write_blocks(to: &File, at: u64, memory: &[u8]) -> io::Result<()> {
    let blocks = memory.chunks(BLOCK).zip((at..).step_by(BLOCK));
    let mut data = blocks.filter(|(block, _)| !is_zero(block));
    data.try_for_each(|(block, at)| to.write_all_at(block, at))
}

/// Reconstructs the memory from the chunks of a diff, which is open after its header. Calls `act` with the offset and
/// the bytes of each chunk. Returns the checksum of this memory as manifests have it: SHA-256 over each block of 64 KiB
/// that is not zero, preceded by its number.
pub(crate) fn unpack_all(
    diff: &File,
    header: &Header,
    base: Option<&File>,
    mut act: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<String> {
    let chunk = CHUNK as u64;
    let mut from = BufReader::new(diff);
    let mut buffer = vec![0; CHUNK];
    let mut sum = Sha256::new();
    let mut next = 0;
    while let Some((number, content)) = memory_diff::read_chunk(&mut from)? {
        let begin = u64::from(number) * chunk;
        if begin < next || begin >= header.length {
            return Err(io::Error::other("its chunks are out of order"));
        }
        next = begin + chunk;
        let memory = part(&mut buffer, header.length - begin);
        memory.fill(0);
        memory_diff::unpack(&content, memory, |page, to| match base {
            Some(base) => base.read_exact_at(to, u64::from(page) * memory_diff::PAGE as u64),
            None => Err(io::Error::other("it uses pages of a base but names none")),
        })?;
        for (block, number) in memory.chunks(BLOCK).zip(begin / BLOCK as u64..) {
            if !is_zero(block) {
                sum.update(number.to_le_bytes());
                sum.update(block);
            }
        }
        act(begin, memory)?;
    }
    Ok(model::hex(&sum.finalize()))
}
