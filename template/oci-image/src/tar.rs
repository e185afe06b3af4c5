//! Reads the entries of a tar archive: v7, ustar, GNU and PAX headers, with extended attributes and sparse files.
//!
//! Nothing is extracted. An [`Entry`] refers to its content by offsets in the archive. Where formats are ambiguous,
//! this reader behaves like Go's `archive/tar`, which most image tools use: a PAX size overrides the header's, links
//! and directories have no content whatever their size field says, and global PAX headers are ignored.

mod header;
mod pax;
mod sparse;

use crate::{limits::Limits, source::Source};
use header::{BLOCK, Header};
use pax::Pax;

/// Limit for the content of a PAX header or a long name, in bytes. Go uses the same limit.
const MAX_SPECIAL: u64 = 1 << 20;
/// Approximate memory cost of an entry in addition to its names, in bytes.
const ENTRY_COST: u64 = 128;

/// One file, directory or link of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The path in the archive, neither normalized nor checked.
    pub path: Vec<u8>,
    pub meta: Meta,
    pub kind: EntryKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    Directory,
    File(Content),
    Symlink(Vec<u8>),
    /// Another name for the file at this path of the image.
    Hardlink(Vec<u8>),
    Fifo,
    /// A character or block device.
    Device,
}

/// Metadata of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Permission bits with set-user-id, set-group-id and sticky, without the file type.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Time,
    /// Names with their namespace (`user.`, `security.`…), sorted, and values.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Seconds and nanoseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    pub seconds: i64,
    pub nanoseconds: u32,
}

/// Content of a regular file as ranges of a layer's archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Index of the layer.
    pub layer: u32,
    /// Size of the file in bytes, including holes.
    pub size: u64,
    /// Sorted, disjoint and not empty, within `size`. Ranges without a segment are zero.
    pub segments: Vec<Segment>,
}

impl Content {
    /// Fills `buffer` with the first bytes of the file. The file must not be shorter.
    pub(crate) fn read(&self, layers: &[impl Source], buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.fill(0);
        let layer = usize::try_from(self.layer).ok();
        let layer = layer.and_then(|layer| layers.get(layer));
        let layer = layer.ok_or(std::io::ErrorKind::NotFound)?;
        for Segment { at, offset, len } in &self.segments {
            let begin = usize::try_from(*at).unwrap_or(usize::MAX);
            let end = usize::try_from(at + len).unwrap_or(usize::MAX);
            let end = end.min(buffer.len());
            if begin < end {
                layer.read_at(&mut buffer[begin..end], *offset)?;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Offset in the file.
    pub at: u64,
    /// Offset in the archive.
    pub offset: u64,
    pub len: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("cannot read the archive")]
    Read(#[source] std::io::Error),
    #[error("archive ends in the middle of an entry at byte {0}")]
    Truncated(u64),
    #[error("archive has an invalid header at byte {at}: {fault}")]
    Header { at: u64, fault: &'static str },
    #[error("archive has an extended header of {0} bytes: the limit is {MAX_SPECIAL}")]
    Special(u64),
    #[error("archive entry {path:?} is of type {kind:?}, which images do not have")]
    Kind { path: String, kind: char },
    #[error("names and attributes of the image's layers exceed the limit of {0} bytes")]
    Metadata(u64),
    #[error("the image's layers have more than {0} entries")]
    Entries(usize),
}

/// Usage of the limits by the archives of one image so far.
#[derive(Clone, Debug)]
pub struct Budget {
    entries: usize,
    metadata: u64,
    limits: Limits,
}

impl Budget {
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        Self {
            entries: limits.entries,
            metadata: limits.metadata,
            limits: limits.clone(),
        }
    }

    fn charge(&mut self, entry: &Entry) -> Result<(), TarError> {
        let too_many = TarError::Entries(self.limits.entries);
        self.entries = self.entries.checked_sub(1).ok_or(too_many)?;
        let mut cost = ENTRY_COST + len(&entry.path);
        for (name, value) in &entry.meta.xattrs {
            cost += len(name) + len(value);
        }
        cost += match &entry.kind {
            EntryKind::Symlink(target) | EntryKind::Hardlink(target) => len(target),
            EntryKind::File(content) => 24 * content.segments.len() as u64,
            EntryKind::Directory | EntryKind::Fifo | EntryKind::Device => 0,
        };
        let too_large = TarError::Metadata(self.limits.metadata);
        self.metadata = self.metadata.checked_sub(cost).ok_or(too_large)?;
        Ok(())
    }
}

fn len(bytes: &[u8]) -> u64 {
    bytes.len() as u64
}

/// Reads all entries of a layer.
///
/// # Errors
/// Returns an error if the archive cannot be read, is malformed, or exceeds the budget.
pub fn read(source: &impl Source, layer: u32, budget: &mut Budget) -> Result<Vec<Entry>, TarError> {
    let mut reader = Reader {
        source,
        layer,
        position: 0,
    };
    let mut entries = Vec::new();
    while let Some(entry) = reader.next()? {
        budget.charge(&entry)?;
        entries.push(entry);
    }
    Ok(entries)
}

struct Reader<'a, S> {
    source: &'a S,
    layer: u32,
    position: u64,
}

/// Extended headers that apply to the next entry.
#[derive(Default)]
struct Extensions {
    pax: Pax,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
}

impl<S: Source> Reader<'_, S> {
    fn next(&mut self) -> Result<Option<Entry>, TarError> {
        let mut extensions = Extensions::default();
        loop {
            let at = self.position;
            let Some(block) = self.block()? else {
                return Ok(None);
            };
            let header = Header::parse(&block).map_err(|fault| TarError::Header { at, fault })?;
            let invalid = |fault| TarError::Header { at, fault };
            match header.kind {
                b'x' => {
                    let records = self.special(header.size)?;
                    extensions.pax = Pax::parse(&records).map_err(invalid)?;
                }
                b'g' => {
                    self.special(header.size)?;
                }
                b'L' => extensions.long_name = Some(text(self.special(header.size)?)),
                b'K' => extensions.long_link = Some(text(self.special(header.size)?)),
                _ => return self.entry(at, &block, header, extensions).map(Some),
            }
        }
    }

    /// The next header. `None` at the end, which is two blocks of zeros, or the end of the file between two entries.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>, TarError> {
        if self.position == self.source.size() {
            return Ok(None);
        }
        let at = self.position;
        let block = self.take()?;
        if block != [0; BLOCK] {
            return Ok(Some(block));
        }
        if self.position == self.source.size() || self.take()? == [0; BLOCK] {
            return Ok(None);
        }
        Err(TarError::Header {
            at,
            fault: "a single block of zeros between two entries",
        })
    }

    fn take(&mut self) -> Result<[u8; BLOCK], TarError> {
        let mut block = [0; BLOCK];
        let end = self.position + BLOCK as u64;
        if end > self.source.size() {
            return Err(TarError::Truncated(self.position));
        }
        (self.source.read_at(&mut block, self.position)).map_err(TarError::Read)?;
        self.position = end;
        Ok(block)
    }

    /// Skips `size` bytes and their padding. Returns the offset of the first skipped byte.
    fn skip(&mut self, size: u64) -> Result<u64, TarError> {
        let begin = self.position;
        let end = begin.checked_add(size).filter(|e| *e <= self.source.size());
        let end = end.ok_or(TarError::Truncated(begin))?;
        // The padding of the last entry may be missing.
        self.position = end.next_multiple_of(BLOCK as u64).min(self.source.size());
        Ok(begin)
    }

    fn special(&mut self, size: u64) -> Result<Vec<u8>, TarError> {
        if size > MAX_SPECIAL {
            return Err(TarError::Special(size));
        }
        let begin = self.skip(size)?;
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        self.source
            .read_at(&mut bytes, begin)
            .map_err(TarError::Read)?;
        Ok(bytes)
    }

    fn entry(
        &mut self,
        at: u64,
        block: &[u8; BLOCK],
        header: Header,
        extensions: Extensions,
    ) -> Result<Entry, TarError> {
        let invalid = |fault| TarError::Header { at, fault };
        let Extensions {
            pax,
            long_name,
            long_link,
        } = extensions;
        let path = (pax.sparse_name().or(pax.path.clone()))
            .or(long_name)
            .unwrap_or(header.name);
        let target = pax.linkpath.clone().or(long_link).unwrap_or(header.link);
        let size = pax.size.unwrap_or(header.size);
        let meta = Meta {
            mode: header.mode,
            uid: id(pax.uid, header.uid).map_err(invalid)?,
            gid: id(pax.gid, header.gid).map_err(invalid)?,
            mtime: pax.mtime.unwrap_or(header.mtime),
            xattrs: pax.xattrs(),
        };
        let kind = match header.kind {
            // v7 archives mark directories only by their names.
            0 if path.ends_with(b"/") => EntryKind::Directory,
            0 | b'0' | b'7' => match pax.sparse {
                Some(map) => EntryKind::File(self.sparse_file(at, &map, size)?),
                None => EntryKind::File(self.file(size)?),
            },
            b'S' => {
                let (size_of_file, map) = self.old_gnu_map(at, block)?;
                EntryKind::File(self.segments(at, size_of_file, &map, size)?)
            }
            b'1' => EntryKind::Hardlink(target),
            b'2' => EntryKind::Symlink(target),
            b'3' | b'4' => EntryKind::Device,
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            other => {
                return Err(TarError::Kind {
                    path: String::from_utf8_lossy(&path).into_owned(),
                    kind: char::from(other),
                });
            }
        };
        Ok(Entry { path, meta, kind })
    }

    fn file(&mut self, size: u64) -> Result<Content, TarError> {
        let offset = self.skip(size)?;
        let segment = Segment {
            at: 0,
            offset,
            len: size,
        };
        Ok(Content {
            layer: self.layer,
            size,
            segments: Vec::from_iter((size > 0).then_some(segment)),
        })
    }
}

/// The text of a GNU long name without its final NUL.
fn text(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
        bytes.truncate(end);
    }
    bytes
}

/// A user or group id. To Linux, the highest value means "no id".
fn id(pax: Option<u64>, header: u64) -> Result<u32, &'static str> {
    let id = u32::try_from(pax.unwrap_or(header));
    id.ok()
        .filter(|id| *id != u32::MAX)
        .ok_or("an owner or group above 4294967294")
}
