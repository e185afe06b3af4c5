//! The context of a span, in the format of the `traceparent` header (W3C Trace Context, level 1).

use std::fmt;

/// Trace and span. Ids are never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    pub(super) trace: [u8; 16],
    pub(super) span: [u8; 8],
    pub(super) is_sampled: bool,
}

impl Context {
    /// Parses a header. Versions after 00 may have further fields. Returns `None` if it is malformed.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim_matches([' ', '\t']);
        let fields: Vec<&str> = text.splitn(5, '-').collect();
        let [version, trace, span, flags, rest @ ..] = fields.as_slice() else {
            return None;
        };
        let [version] = bytes(version)?;
        if version == 0xff || (version == 0 && !rest.is_empty()) {
            return None;
        }
        let [flags] = bytes(flags)?;
        let (trace, span) = (bytes::<16>(trace)?, bytes::<8>(span)?);
        let is_zero = trace == [0; 16] || span == [0; 8];
        (!is_zero).then_some(Self {
            trace,
            span,
            is_sampled: flags & 1 == 1,
        })
    }

    /// A new trace, for a share of the calls. `None` if the call is not sampled, or the kernel has no random bytes.
    pub(super) fn root(share: f64) -> Option<Self> {
        let mut drawn = [0; 32];
        getrandom::fill(&mut drawn).ok()?;
        let [a, b, c, d, ..] = drawn;
        let chance = f64::from(u32::from_le_bytes([a, b, c, d])) / f64::from(u32::MAX);
        if share <= 0.0 || chance > share {
            return None;
        }
        let (mut trace, mut span) = ([0; 16], [0; 8]);
        trace.copy_from_slice(&drawn[8..24]);
        span.copy_from_slice(&drawn[24..]);
        // A version of zeros would be malformed.
        trace[0] |= 1;
        span[0] |= 1;
        Some(Self {
            trace,
            span,
            is_sampled: true,
        })
    }

    /// A new span of this trace.
    pub(super) fn child(self) -> Option<Self> {
        let mut span = [0; 8];
        getrandom::fill(&mut span).ok()?;
        span[0] |= 1;
        Some(Self { span, ..self })
    }
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-")?;
        self.trace.iter().try_for_each(|b| write!(f, "{b:02x}"))?;
        write!(f, "-")?;
        self.span.iter().try_for_each(|b| write!(f, "{b:02x}"))?;
        write!(f, "-{:02x}", u8::from(self.is_sampled))
    }
}

/// Parses exactly this number of bytes in lower-case hex.
fn bytes<const N: usize>(hex: &str) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_parse_as_the_standard_says() {
        const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let context = Context::parse(GOOD).unwrap();
        assert!(context.is_sampled);
        assert_eq!(context.to_string(), GOOD);
        let later = GOOD.replacen("00", "cc", 1) + "-what-the-future";
        assert_eq!(Context::parse(&later), Some(context));
        assert!(
            !Context::parse(&GOOD.replace("-01", "-02"))
                .unwrap()
                .is_sampled
        );
        let child = context.child().unwrap();
        assert!(child.trace == context.trace && child.span != context.span);
        for wrong in [
            "",
            "00",
            &GOOD.to_uppercase(),
            &GOOD.replacen("00", "ff", 1),
            &format!("{GOOD}-x"),
            &GOOD[1..],
            &GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &GOOD.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &GOOD.replace("4bf9", "4bg9"),
            "00-ä-ö-01",
        ] {
            assert_eq!(Context::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_share_of_new_traces_is_taken() {
        assert_eq!(Context::root(0.0), None);
        assert!((0..100).all(|_| Context::root(1.0).is_some()));
        let taken = (0..2000).filter(|_| Context::root(0.25).is_some()).count();
        assert!((350..650).contains(&taken), "{taken} of 2000");
    }
}
