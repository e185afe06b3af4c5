//! Byte quantities in text, such as `"512MiB"` and `"4GiB"`. A bare number is never a size.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A number of bytes. As text it is a whole number and a unit, which spaces may separate: `B`, `KiB`, `MiB`, `GiB`,
/// `KB`, `MB`, `GB`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(into = "String", try_from = "String")]
pub struct Bytes(pub u64);

/// Reason why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The text has no unit or an unknown one.
    #[error("{0:?} is not a size: write a whole number and one of B, KiB, MiB, GiB, KB, MB, GB")]
    Shape(String),
    /// The number of bytes does not fit 64 bits.
    #[error("{0:?} is too large: a size must fit in 64 bits")]
    TooLarge(String),
}

const UNITS: [(&str, u64); 7] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

impl Bytes {
    /// `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// Formats the size for users: two or three digits and a binary unit, such as `1.5 KiB` and `390 MiB`.
    #[must_use]
    pub fn rounded(self) -> String {
        let units = UNITS.iter().filter(|(name, _)| name.contains('i'));
        let (name, unit) = (units.copied().find(|(_, unit)| self.0 >= *unit)).unwrap_or(("B", 1));
        let tenths = (u128::from(self.0) * 10 + u128::from(unit) / 2) / u128::from(unit);
        if unit == 1 || tenths >= 100 {
            format!("{} {name}", (tenths + 5) / 10)
        } else {
            format!("{}.{} {name}", tenths / 10, tenths % 10)
        }
    }
}

impl FromStr for Bytes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let shape = || SizeError::Shape(text.to_owned());
        let (digits, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| text.strip_suffix(name).map(|d| (d.trim_end(), *unit)))
            .ok_or_else(shape)?;
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(shape());
        }
        digits
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(unit))
            .map(Self)
            .ok_or_else(|| SizeError::TooLarge(text.to_owned()))
    }
}

impl fmt::Display for Bytes {
    /// Writes the size in the largest binary unit that represents it exactly.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, unit) = UNITS
            .iter()
            .filter(|(name, _)| name.contains('i') || *name == "B")
            .find(|(_, unit)| self.0 != 0 && self.0.is_multiple_of(*unit))
            .unwrap_or(&("B", 1));
        write!(f, "{}{name}", self.0 / unit)
    }
}

impl From<Bytes> for String {
    fn from(b: Bytes) -> Self {
        b.to_string()
    }
}

impl TryFrom<String> for Bytes {
    type Error = SizeError;

    fn try_from(text: String) -> Result<Self, SizeError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_parse_with_their_units() {
        assert_eq!("512MiB".parse(), Ok(Bytes(512 << 20)));
        assert_eq!("5 MB".parse(), Ok(Bytes(5_000_000)));
        assert!(matches!("512".parse::<Bytes>(), Err(SizeError::Shape(_))));
        assert!(matches!("-1MiB".parse::<Bytes>(), Err(SizeError::Shape(_))));
        assert!(matches!(
            "99999999999GiB".parse::<Bytes>(),
            Err(SizeError::TooLarge(_))
        ));
    }

    #[test]
    fn rounded_sizes_have_binary_units() {
        for (n, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (10 << 20, "10 MiB"),
            (3_328_599_654, "3.1 GiB"),
            (u64::MAX, "17179869184 GiB"),
        ] {
            assert_eq!(Bytes(n).rounded(), text);
        }
    }

    proptest! {
        #[test]
        fn displayed_sizes_parse_back(n: u64) {
            prop_assert_eq!(Bytes(n).to_string().parse(), Ok(Bytes(n)));
        }
    }
}
