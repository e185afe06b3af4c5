//! A wall-clock time on the wire.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Nanoseconds since 1970-01-01T00:00:00Z, never negative. Written as RFC 3339 text with nanoseconds in
/// UTC; read from that, from RFC 3339 with an offset, or from a number of nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    unix_ns: u64,
}

/// The text is not a time at or after 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an RFC 3339 time between 1970 and 2554")]
pub struct TimestampError;

const NS_PER_S: u64 = 1_000_000_000;
const S_PER_DAY: u64 = 86_400;

impl Timestamp {
    /// From nanoseconds since the epoch.
    #[must_use]
    pub fn from_unix_ns(unix_ns: u64) -> Self {
        Self { unix_ns }
    }

    /// Nanoseconds since the epoch.
    #[must_use]
    pub fn unix_ns(self) -> u64 {
        self.unix_ns
    }

    /// Reads RFC 3339.
    ///
    /// # Errors
    /// See [`TimestampError`].
    pub fn parse(text: &str) -> Result<Self, TimestampError> {
        parse(text.as_bytes()).ok_or(TimestampError)
    }
}

/// The number of a run of exactly `N` digits, and what follows.
fn digits<const N: usize>(text: &[u8]) -> Option<(u64, &[u8])> {
    let (run, rest) = text.split_first_chunk::<N>()?;
    let mut number = 0;
    for byte in run {
        let digit = char::from(*byte).to_digit(10)?;
        number = number * 10 + u64::from(digit);
    }
    Some((number, rest))
}

fn after<'a>(text: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    let (first, rest) = text.split_first()?;
    wanted.contains(first).then_some(rest)
}

fn parse(text: &[u8]) -> Option<Timestamp> {
    let (year, text) = digits::<4>(text)?;
    let (month, text) = digits::<2>(after(text, b"-")?)?;
    let (day, text) = digits::<2>(after(text, b"-")?)?;
    let (hour, text) = digits::<2>(after(text, b"Tt ")?)?;
    let (minute, text) = digits::<2>(after(text, b":")?)?;
    let (second, text) = digits::<2>(after(text, b":")?)?;
    let (ns, text) = fraction(text)?;
    let in_range = (1970..=2553).contains(&year) && hour < 24 && minute < 60 && second <= 60;
    if !in_range || !(1..=12).contains(&month) || !(1..=days_in(year, month)).contains(&day) {
        return None;
    }
    let local = days_before(year, month, day) * S_PER_DAY + hour * 3600 + minute * 60 + second;
    let seconds = match offset(text)? {
        Offset::East(by) => local.checked_sub(by)?,
        Offset::West(by) => local + by,
    };
    let unix_ns = seconds * NS_PER_S + ns;
    Some(Timestamp { unix_ns })
}

/// `.123` in nanoseconds, zero when there is none; digits after the ninth are dropped.
fn fraction(text: &[u8]) -> Option<(u64, &[u8])> {
    let Some(text) = after(text, b".") else {
        return Some((0, text));
    };
    let len = text.iter().take_while(|b| b.is_ascii_digit()).count();
    let (run, rest) = text.split_at_checked(len).filter(|_| len > 0)?;
    let mut ns = 0;
    for place in 0..9 {
        let digit = run.get(place).map_or(0, |b| u64::from(b - b'0'));
        ns = ns * 10 + digit;
    }
    Some((ns, rest))
}

enum Offset {
    East(u64),
    West(u64),
}

fn offset(text: &[u8]) -> Option<Offset> {
    if matches!(text, b"Z" | b"z") {
        return Some(Offset::East(0));
    }
    let (sign, rest) = text.split_first()?;
    let (hours, rest) = digits::<2>(rest)?;
    let (minutes, rest) = digits::<2>(after(rest, b":")?)?;
    let by = hours * 3600 + minutes * 60;
    match (sign, rest) {
        (b'+', []) if hours < 24 && minutes < 60 => Some(Offset::East(by)),
        (b'-', []) if hours < 24 && minutes < 60 => Some(Offset::West(by)),
        _ => None,
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in(year: u64, month: u64) -> u64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from 1970-01-01 to the given day.
fn days_before(year: u64, month: u64, day: u64) -> u64 {
    let years: u64 = (1970..year).map(|y| 365 + u64::from(is_leap(y))).sum();
    let months: u64 = (1..month).map(|m| days_in(year, m)).sum();
    years + months + day - 1
}

impl std::fmt::Display for Timestamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (seconds, ns) = (self.unix_ns / NS_PER_S, self.unix_ns % NS_PER_S);
        let (mut days, in_day) = (seconds / S_PER_DAY, seconds % S_PER_DAY);
        let (mut year, mut month) = (1970, 1);
        while days >= 365 + u64::from(is_leap(year)) {
            days -= 365 + u64::from(is_leap(year));
            year += 1;
        }
        while days >= days_in(year, month) {
            days -= days_in(year, month);
            month += 1;
        }
        let (hour, minute, second) = (in_day / 3600, in_day / 60 % 60, in_day % 60);
        let day = days + 1;
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ns:09}Z"
        )
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
        fn text_and_number_agree(unix_ns in 0_u64..18_400_000_000_000_000_000) {
            let time = Timestamp { unix_ns };
            prop_assert_eq!(Timestamp::parse(&time.to_string()), Ok(time));
        }

        #[test]
        fn hostile_text_never_panics(text in "[0-9TtZz:+. -]{0,40}") {
            let _ = Timestamp::parse(&text);
        }
    }

    #[test]
    fn known_times() {
        let second = |text| Timestamp::parse(text).unwrap().unix_ns() / NS_PER_S;
        assert_eq!(second("2000-02-29T00:00:00Z"), 951_782_400);
        assert_eq!(second("2024-03-01T01:00:00.5+01:00"), 1_709_251_200);
        assert_eq!(second("2023-12-31T23:00:00-01:00"), 1_704_067_200);
        for bad in [
            "",
            "2023-02-29T00:00:00Z",
            "2024-01-01T00:00:00",
            "1969-12-31T00:00:00Z",
        ] {
            assert_eq!(Timestamp::parse(bad), Err(TimestampError), "{bad}");
        }
    }
}
