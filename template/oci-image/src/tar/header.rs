//! The header block of an entry.

use super::Time;

pub(super) const BLOCK: usize = 512;

/// Fields of a header block (POSIX 1003.1-2024, `pax`, "ustar Interchange Format").
pub(super) struct Header {
    pub(super) kind: u8,
    pub(super) name: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) mode: u16,
    pub(super) uid: u64,
    pub(super) gid: u64,
    pub(super) size: u64,
    pub(super) mtime: Time,
}

impl Header {
    pub(super) fn parse(block: &[u8; BLOCK]) -> Result<Self, &'static str> {
        check_sum(block)?;
        let mode = number(&block[100..108])?;
        let mut name = text(&block[..100]).to_vec();
        // The GNU format has different fields in place of the prefix. Its magic ends with spaces.
        if block[257..263] == *b"ustar\0" {
            let prefix = text(&block[345..500]);
            if !prefix.is_empty() {
                name = [prefix, b"/", &name].concat();
            }
        }
        let unsigned = |value: i64, fault| u64::try_from(value).map_err(|_| fault);
        Ok(Self {
            kind: block[156],
            name,
            link: text(&block[157..257]).to_vec(),
            mode: u16::try_from(mode & 0o7777).map_err(|_| "a negative mode")?,
            uid: unsigned(number(&block[108..116])?, "a negative owner")?,
            gid: unsigned(number(&block[116..124])?, "a negative group")?,
            size: unsigned(number(&block[124..136])?, "a negative size")?,
            mtime: Time {
                seconds: number(&block[136..148])?,
                nanoseconds: 0,
            },
        })
    }
}

/// Checks the checksum: the sum of all bytes, with the checksum field as spaces. Old archives sum signed bytes.
fn check_sum(block: &[u8; BLOCK]) -> Result<(), &'static str> {
    let want = number(&block[148..156])?;
    let bytes = || {
        let field = 148..156;
        let byte = move |(i, byte): (usize, &u8)| {
            if field.contains(&i) { b' ' } else { *byte }
        };
        block.iter().enumerate().map(byte)
    };
    let unsigned: i64 = bytes().map(i64::from).sum();
    let signed: i64 = bytes().map(|byte| i64::from(byte.cast_signed())).sum();
    if want == unsigned || want == signed {
        return Ok(());
    }
    Err("its checksum is wrong")
}

/// Bytes up to the first NUL.
pub(super) fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// A number in octal digits, surrounded by spaces and NULs. If the first bit is set, a big-endian two's complement
/// number (GNU).
pub(super) fn number(field: &[u8]) -> Result<i64, &'static str> {
    const FAULT: &str = "a number field is not a number";
    let Some(first) = field.first() else {
        return Err(FAULT);
    };
    if first & 0x80 != 0 {
        let negative = first & 0x40 != 0;
        let start: i128 = if negative { -1 } else { 0 };
        let mut value = start << 7 | i128::from(first & 0x7f);
        for byte in &field[1..] {
            value = value << 8 | i128::from(*byte);
        }
        return i64::try_from(value).map_err(|_| "a number field is too large");
    }
    let is_padding = |byte: &u8| matches!(byte, b' ' | 0);
    let digits = field.split(is_padding).find(|run| !run.is_empty());
    let after = field.iter().skip_while(|byte| is_padding(byte));
    let mut rest = after.skip_while(|byte| !is_padding(byte));
    if rest.any(|byte| !is_padding(byte)) {
        return Err(FAULT);
    }
    let mut value: i64 = 0;
    for digit in digits.unwrap_or_default() {
        if !matches!(digit, b'0'..=b'7') {
            return Err(FAULT);
        }
        // At most 12 octal digits: 36 bits.
        value = value << 3 | i64::from(digit - b'0');
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_big_endian() {
        for (field, want) in [
            (&b"0000644\0"[..], Ok(0o644)),
            (b" 17 \0\0\0\0", Ok(0o17)),
            (b"\0\0\0\0\0\0\0\0", Ok(0)),
            (b"777777777777", Ok(0o777_777_777_777)),
            (b"\x80\0\0\0\0\0\x01\0", Ok(256)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xfe", Ok(-2)),
        ] {
            assert_eq!(number(field), want, "{field:?}");
        }
        let large = b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff";
        for field in [&b"12 34\0\0\0"[..], b"0000008\0", b"-1\0", b"", large] {
            assert!(number(field).is_err(), "{field:?}");
        }
    }
}
