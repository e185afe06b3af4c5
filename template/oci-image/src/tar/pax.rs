//! PAX extended headers: records `LENGTH KEY=VALUE\n`.

use std::collections::BTreeMap;

use super::Time;

const XATTR: &[u8] = b"SCHILY.xattr.";
const MALFORMED: &str = "a malformed PAX record";

/// Records that override fields of the next header.
#[derive(Default)]
pub(super) struct Pax {
    pub(super) path: Option<Vec<u8>>,
    pub(super) linkpath: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<Time>,
    /// Set if the file is sparse.
    pub(super) sparse: Option<SparseRecords>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Records of GNU's three PAX formats of sparse files.
#[derive(Default)]
pub(super) struct SparseRecords {
    pub(super) major: u64,
    pub(super) name: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    /// Alternating offsets and lengths, of the formats 0.0 and 0.1.
    pub(super) map: Vec<u64>,
}

impl Pax {
    pub(super) fn parse(mut records: &[u8]) -> Result<Self, &'static str> {
        let mut pax = Self::default();
        while !records.is_empty() {
            let (key, value, rest) = split(records).ok_or(MALFORMED)?;
            pax.take(key, value)?;
            records = rest;
        }
        Ok(pax)
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), &'static str> {
        let text = || (!value.is_empty()).then(|| value.to_vec());
        let maybe = || {
            let given = (!value.is_empty()).then(|| decimal(value));
            given.transpose()
        };
        match key {
            b"path" => self.path = text(),
            b"linkpath" => self.linkpath = text(),
            b"size" => self.size = maybe()?,
            b"uid" => self.uid = maybe()?,
            b"gid" => self.gid = maybe()?,
            b"mtime" if value.is_empty() => self.mtime = None,
            b"mtime" => self.mtime = Some(time(value)?),
            _ => {
                if let Some(name) = key.strip_prefix(XATTR) {
                    self.xattrs.insert(name.to_vec(), value.to_vec());
                } else if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                    self.take_sparse(key, value)?;
                }
            }
        }
        Ok(())
    }

    fn take_sparse(&mut self, key: &[u8], value: &[u8]) -> Result<(), &'static str> {
        let sparse = self.sparse.get_or_insert_default();
        match key {
            b"major" => sparse.major = decimal(value)?,
            b"name" => sparse.name = Some(value.to_vec()),
            b"size" | b"realsize" => sparse.size = Some(decimal(value)?),
            b"offset" | b"numbytes" => {
                let wants_offset = sparse.map.len().is_multiple_of(2);
                if wants_offset != (key == b"offset") {
                    return Err("a sparse map with offsets and lengths out of order");
                }
                sparse.map.push(decimal(value)?);
            }
            b"map" => {
                let numbers = value.split(|byte| *byte == b',');
                sparse.map = numbers.map(decimal).collect::<Result<_, _>>()?;
            }
            _ => {}
        }
        Ok(())
    }

    /// The file's real name. The `path` of a sparse file contains an additional directory.
    pub(super) fn sparse_name(&self) -> Option<Vec<u8>> {
        self.sparse.as_ref()?.name.clone()
    }

    /// The extended attributes, sorted by name.
    pub(super) fn xattrs(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let pairs = self.xattrs.iter();
        pairs
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }
}

/// Splits the first record into key, value and the rest.
fn split(records: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = records.iter().take(20).position(|byte| *byte == b' ')?;
    let len = usize::try_from(decimal(&records[..space]).ok()?).ok()?;
    let (record, rest) = records.split_at_checked(len)?;
    let pair = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = pair.iter().position(|byte| *byte == b'=')?;
    let (key, value) = (&pair[..equals], &pair[equals + 1..]);
    // A NUL would end a name or a path early.
    let is_path = matches!(key, b"path" | b"linkpath" | b"GNU.sparse.name");
    let has_nul = key.contains(&0) || (is_path && value.contains(&0));
    (!key.is_empty() && !has_nul).then_some((key, value, rest))
}

pub(super) fn decimal(text: &[u8]) -> Result<u64, &'static str> {
    let digits = std::str::from_utf8(text).ok();
    digits
        .filter(|text| text.bytes().all(|c| c.is_ascii_digit()))
        .and_then(|text| text.parse().ok())
        .ok_or("a PAX record with an invalid number")
}

/// Seconds with an optional sign and fraction. Digits after the ninth are truncated.
fn time(text: &[u8]) -> Result<Time, &'static str> {
    let fault = "a PAX record with an invalid time";
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut parts = text.splitn(2, |byte| *byte == b'.');
    let seconds = decimal(parts.next().unwrap_or_default()).map_err(|_| fault)?;
    let seconds = i64::try_from(seconds).map_err(|_| fault)?;
    let mut nanoseconds: u32 = 0;
    let mut digits = parts.next().unwrap_or_default().iter();
    if digits.clone().any(|c| !c.is_ascii_digit()) {
        return Err(fault);
    }
    for _ in 0..9 {
        let digit = digits.next().map_or(0, |c| u32::from(c - b'0'));
        nanoseconds = nanoseconds * 10 + digit;
    }
    Ok(match (negative, nanoseconds) {
        (false, nanoseconds) => Time {
            seconds,
            nanoseconds,
        },
        (true, 0) => Time {
            seconds: -seconds,
            nanoseconds: 0,
        },
        (true, nanoseconds) => Time {
            seconds: -seconds - 1,
            nanoseconds: 1_000_000_000 - nanoseconds,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_end_where_their_length_says() {
        let pax = Pax::parse(b"12 path=a\nb\n9 size=7\n26 SCHILY.xattr.user.a=\x00=\n").unwrap();
        assert_eq!(pax.path.as_deref(), Some(&b"a\nb"[..]));
        assert_eq!(pax.size, Some(7));
        assert_eq!(pax.xattrs(), [(b"user.a".to_vec(), b"\x00=".to_vec())]);
        for bad in [
            &b"11 path=a\nb\n"[..],
            b"13 path=a\nb\n",
            b"4 =\n",
            b"99999999999999999999 a=b\n",
            b"9 size=x\n",
            b"10 path=\x00\n",
            b"10 pat\x00=a\n",
            b"x",
        ] {
            assert!(Pax::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn times_may_be_negative_and_have_fractions() {
        let of = |seconds, nanoseconds| {
            Ok(Time {
                seconds,
                nanoseconds,
            })
        };
        assert_eq!(time(b"12.0345678919"), of(12, 34_567_891));
        assert_eq!(time(b"-1.25"), of(-2, 750_000_000));
        assert_eq!(time(b"-3"), of(-3, 0));
        assert!(time(b"1.-5").is_err() && time(b"").is_err() && time(b"--1").is_err());
    }
}
