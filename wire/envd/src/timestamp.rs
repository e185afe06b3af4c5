//! Wall-clock times on the wire.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Nanoseconds since 1970-01-01T00:00:00Z. Written as RFC 3339 text in UTC with nanoseconds; read from RFC 3339 text
/// with any offset, or from a number of nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    unix_ns: u64,
}

/// The text is not an RFC 3339 time, or cannot be represented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an RFC 3339 time between 1970 and 2554")]
pub struct TimestampError;

impl Timestamp {
    #[must_use]
    pub fn from_unix_ns(unix_ns: u64) -> Self {
        Self { unix_ns }
    }

    #[must_use]
    pub fn from_unix_ms(unix_ms: u64) -> Self {
        Self::from_unix_ns(unix_ms.saturating_mul(1_000_000))
    }

    #[must_use]
    pub fn unix_ns(self) -> u64 {
        self.unix_ns
    }

    /// Parses RFC 3339 text. Digits after the ninth of a fraction are dropped.
    ///
    /// # Errors
    /// Returns [`TimestampError`] for other text and for times before 1970 or after 2554.
    pub fn parse(text: &str) -> Result<Self, TimestampError> {
        parse(&text.to_ascii_uppercase()).ok_or(TimestampError)
    }
}

fn parse(text: &str) -> Option<Timestamp> {
    let (local, offset) = split_offset(text)?;
    // `humantime` reads UTC only. It also reads a fraction without digits, which RFC 3339 does not allow.
    let local = humantime::parse_rfc3339_weak(local)
        .ok()
        .filter(|_| !local.ends_with('.'))?;
    let local = local.duration_since(UNIX_EPOCH).ok()?;
    let since_epoch = match offset {
        Offset::East(by) => local.checked_sub(by)?,
        Offset::West(by) => local.checked_add(by)?,
    };
    let unix_ns = u64::try_from(since_epoch.as_nanos()).ok()?;
    Some(Timestamp { unix_ns })
}

/// Distance of local time from UTC.
enum Offset {
    East(Duration),
    West(Duration),
}

/// Splits a time into local time and offset.
fn split_offset(text: &str) -> Option<(&str, Offset)> {
    if let Some(local) = text.strip_suffix('Z') {
        return Some((local, Offset::East(Duration::ZERO)));
    }
    let (local, offset) = text.split_at_checked(text.len().checked_sub("+00:00".len())?)?;
    let (hours, minutes) = offset.get(1..)?.split_once(':')?;
    let number = |digits: &str, below: u64| {
        let is_number = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_digit());
        let number: u64 = digits.parse().ok()?;
        (is_number && number < below).then_some(number)
    };
    let by = Duration::from_secs(number(hours, 24)? * 3600 + number(minutes, 60)? * 60);
    match offset.as_bytes().first()? {
        b'+' => Some((local, Offset::East(by))),
        b'-' => Some((local, Offset::West(by))),
        _ => None,
    }
}

impl std::fmt::Display for Timestamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(self.unix_ns);
        write!(f, "{}", humantime::format_rfc3339_nanos(time))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Time;
        impl de::Visitor<'_> for Time {
            type Value = Timestamp;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an RFC 3339 time or nanoseconds since 1970")
            }
            fn visit_u64<E: de::Error>(self, unix_ns: u64) -> Result<Timestamp, E> {
                Ok(Timestamp { unix_ns })
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Timestamp, E> {
                Timestamp::parse(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn text_and_number_round_trip(unix_ns in 0_u64..18_400_000_000_000_000_000) {
            let time = Timestamp { unix_ns };
            prop_assert_eq!(Timestamp::parse(&time.to_string()), Ok(time));
        }

        #[test]
        fn no_text_panics(text in "[0-9TtZz:+. -é]{0,40}") {
            let _ = Timestamp::parse(&text);
        }
    }

    #[test]
    fn known_times_are_parsed_and_others_refused() {
        let second = |text| Timestamp::parse(text).unwrap().unix_ns() / 1_000_000_000;
        assert_eq!(second("2000-02-29T00:00:00Z"), 951_782_400);
        assert_eq!(second("2024-03-01T01:00:00.5+01:00"), 1_709_251_200);
        assert_eq!(second("2023-12-31T23:00:00-01:00"), 1_704_067_200);
        for bad in [
            "",
            "2023-02-29T00:00:00Z",
            "2024-01-01T00:00:00",
            "2024-01-01T00:00:00.Z",
            "2024-01-01T00:00:00+1:00",
            "2024-01-01T00:00:00+24:00",
            "1969-12-31T00:00:00Z",
            "2555-01-01T00:00:00Z",
        ] {
            assert_eq!(Timestamp::parse(bad), Err(TimestampError), "{bad}");
        }
    }
}
