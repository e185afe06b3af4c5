//! Sparse files: GNU's old format and its three PAX formats.

use super::{
    BLOCK, Content, Reader, Segment, TarError,
    header::number,
    pax::{SparseRecords, decimal},
};
use crate::source::Source;

/// Maximum number of entries of a sparse map.
const MAX_MAP: usize = 1 << 20;
const UNORDERED: &str = "a sparse map that is not sorted or exceeds the file";

impl<S: Source> Reader<'_, S> {
    /// A sparse file in one of the PAX formats, with `size` bytes in the archive.
    pub(super) fn sparse_file(
        &mut self,
        at: u64,
        records: &SparseRecords,
        size: u64,
    ) -> Result<Content, TarError> {
        let invalid = |fault| TarError::Header { at, fault };
        let file_size = records
            .size
            .ok_or(invalid("a sparse file without a size"))?;
        if records.major == 0 {
            return self.segments(at, file_size, &records.map, size);
        }
        if records.major != 1 {
            return Err(invalid("a sparse file of an unknown format"));
        }
        let begin = self.position;
        let map = self.leading_map(at, size)?;
        let used = self.position - begin;
        let rest = size.checked_sub(used).ok_or(invalid(UNORDERED))?;
        self.segments(at, file_size, &map, rest)
    }

    /// The map of format 1.0, which precedes the data: decimal numbers, one on each line, starting with the number of
    /// pairs, padded to a whole block.
    fn leading_map(&mut self, at: u64, size: u64) -> Result<Vec<u64>, TarError> {
        let invalid = |fault| TarError::Header { at, fault };
        let end = self.position.saturating_add(size);
        let (mut map, mut line) = (Vec::new(), Vec::new());
        let mut wanted: Option<usize> = None;
        while self.position < end {
            for byte in self.take()? {
                if byte != b'\n' {
                    line.push(byte);
                    if line.len() > 20 {
                        return Err(invalid(UNORDERED));
                    }
                    continue;
                }
                let number = decimal(&line).map_err(invalid)?;
                line.clear();
                match wanted {
                    None => {
                        let pairs = usize::try_from(number).unwrap_or(usize::MAX);
                        if pairs > MAX_MAP {
                            return Err(invalid("a sparse map that is too long"));
                        }
                        wanted = Some(2 * pairs);
                    }
                    Some(_) => map.push(number),
                }
                if wanted == Some(map.len()) {
                    return Ok(map);
                }
            }
        }
        Err(invalid("a sparse map without an end"))
    }

    /// Size and map of the old format: four pairs in the header, and 21 in each block that follows it.
    pub(super) fn old_gnu_map(
        &mut self,
        at: u64,
        header: &[u8; BLOCK],
    ) -> Result<(u64, Vec<u64>), TarError> {
        let invalid = |fault| TarError::Header { at, fault };
        let unsigned = |field: &[u8]| {
            let value = number(field).map_err(invalid)?;
            u64::try_from(value).map_err(|_| invalid(UNORDERED))
        };
        let size = unsigned(&header[483..495])?;
        let mut map = Vec::new();
        let mut pairs = header[386..482].to_vec();
        let mut continues = header[482] != 0;
        loop {
            for pair in pairs.chunks(24).take_while(|pair| pair[0] != 0) {
                map.push(unsigned(&pair[..12])?);
                map.push(unsigned(&pair[12..])?);
            }
            if !continues {
                return Ok((size, map));
            }
            if map.len() > 2 * MAX_MAP {
                return Err(invalid("a sparse map that is too long"));
            }
            let block = self.take()?;
            pairs = block[..504].to_vec();
            continues = block[504] != 0;
        }
    }

    /// The content described by `map` (alternating offsets and lengths), with `size` bytes in the archive.
    pub(super) fn segments(
        &mut self,
        at: u64,
        file_size: u64,
        map: &[u64],
        size: u64,
    ) -> Result<Content, TarError> {
        let invalid = |fault| TarError::Header { at, fault };
        let (mut segments, mut end, mut used) = (Vec::new(), 0, 0);
        let begin = self.skip(size)?;
        for pair in map.chunks(2) {
            let [at, len] = *pair else {
                return Err(invalid(UNORDERED));
            };
            let next = at.checked_add(len).filter(|next| *next <= file_size);
            let next = next.ok_or(invalid(UNORDERED))?;
            if at < end || len > size - used {
                return Err(invalid(UNORDERED));
            }
            if len > 0 {
                segments.push(Segment {
                    at,
                    offset: begin + used,
                    len,
                });
            }
            (end, used) = (next, used + len);
        }
        if used != size {
            return Err(invalid("a sparse map that does not cover the data"));
        }
        Ok(Content {
            layer: self.layer,
            size: file_size,
            segments,
        })
    }
}
