//! The range of a file and the content coding of a response (RFC 9110, 12.5.3 and 14). Pure.

/// The requested part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The whole file: there is no range, or it is malformed or unsupported (several ranges, other units).
    Whole,
    /// These bytes.
    Part { start: u64, len: u64 },
    /// The range contains no byte of the file.
    Unsatisfiable,
}

/// Reads `bytes=2-5`, `bytes=2-` and `bytes=-5` for a file of `size` bytes.
pub(crate) fn wanted(range: Option<&str>, size: u64) -> Wanted {
    let set = range.and_then(|range| range.trim().strip_prefix("bytes="));
    let Some((first, last)) = set.and_then(|set| set.trim().split_once('-')) else {
        return Wanted::Whole;
    };
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        // A number that does not fit is beyond the end of every file.
        is_number.then(|| text.parse::<u64>().unwrap_or(u64::MAX))
    };
    let (start, end) = match (first, number(first), last, number(last)) {
        ("", _, _, Some(0)) => return Wanted::Unsatisfiable,
        ("", _, _, Some(count)) => (size.saturating_sub(count), size),
        (_, Some(start), "", _) => (start, size),
        (_, Some(start), _, Some(last)) if start <= last => (start, last.saturating_add(1)),
        _ => return Wanted::Whole,
    };
    if start < size {
        Wanted::Part {
            start,
            len: end.min(size) - start,
        }
    } else {
        Wanted::Unsatisfiable
    }
}

/// The content coding of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Identity,
    Gzip,
}

/// Chooses the coding for an `Accept-Encoding` header; `None` if no offered coding is acceptable.
///
/// Gzip is chosen only if it is the only compression that the header names, which is how the SDKs ask for it. HTTP
/// libraries list every compression they support on each request; compressing for them would only slow the guest down.
pub(crate) fn coding(accept: &str) -> Option<Coding> {
    let (mut gzip, mut identity, mut any, mut others) = (None, None, None, false);
    for item in accept.split(',').filter(|item| !item.trim().is_empty()) {
        let mut parts = item.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let weight = parts
            .filter_map(|part| part.split_once('='))
            .find(|(key, _)| key.trim().eq_ignore_ascii_case("q"))
            .and_then(|(_, weight)| weight.trim().parse::<f32>().ok())
            .unwrap_or(1.0);
        match name {
            _ if name.eq_ignore_ascii_case("gzip") => gzip = Some(weight),
            _ if name.eq_ignore_ascii_case("identity") => identity = Some(weight),
            "*" => any = Some(weight),
            _ => others |= weight > 0.0,
        }
    }
    let identity_will_do = identity.or(any).is_none_or(|weight| weight > 0.0);
    let gzip_will_do = gzip.or(any).is_some_and(|weight| weight > 0.0);
    let asked_for = gzip.is_some_and(|weight| weight > 0.0 && weight >= identity.unwrap_or(0.0));
    match (asked_for && !others, identity_will_do, gzip_will_do) {
        (true, _, _) | (_, false, true) => Some(Coding::Gzip),
        (_, true, _) => Some(Coding::Identity),
        (_, false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_are_read() {
        let part = |start, len| Wanted::Part { start, len };
        for (range, wanted_of_ten) in [
            ("bytes=2-5", part(2, 4)),
            ("bytes=2-", part(2, 8)),
            ("bytes=-3", part(7, 3)),
            ("bytes=-99", part(0, 10)),
            ("bytes=9-99999999999999999999", part(9, 1)),
            ("bytes=10-", Wanted::Unsatisfiable),
            ("bytes=-0", Wanted::Unsatisfiable),
            ("bytes=5-2", Wanted::Whole),
            ("bytes=0-1,3-4", Wanted::Whole),
            ("bytes=-", Wanted::Whole),
            ("bytes=+1-2", Wanted::Whole),
            ("lines=1-2", Wanted::Whole),
            ("", Wanted::Whole),
        ] {
            assert_eq!(wanted(Some(range), 10), wanted_of_ten, "{range}");
        }
        assert_eq!(wanted(Some("bytes=-5"), 0), Wanted::Unsatisfiable);
        assert_eq!(wanted(None, 10), Wanted::Whole);
    }

    #[test]
    fn gzip_is_for_those_who_ask_for_it() {
        for (accept, coding_for_it) in [
            ("", Some(Coding::Identity)),
            ("gzip", Some(Coding::Gzip)),
            ("GZIP;q=0.5", Some(Coding::Gzip)),
            ("gzip, identity;q=0.5", Some(Coding::Gzip)),
            ("gzip;q=0.5, identity", Some(Coding::Identity)),
            ("gzip, deflate", Some(Coding::Identity)),
            ("br, gzip, deflate, zstd", Some(Coding::Identity)),
            ("gzip;q=0", Some(Coding::Identity)),
            ("*", Some(Coding::Identity)),
            ("identity;q=0, *", Some(Coding::Gzip)),
            ("gzip, deflate, *;q=0", Some(Coding::Gzip)),
            ("identity;q=0", None),
            ("br, *;q=0", None),
        ] {
            assert_eq!(coding(accept), coding_for_it, "{accept}");
        }
    }

    proptest! {
        #[test]
        fn a_part_is_inside_the_file(range in "(bytes=)?[0-9-]{0,22}", size in 0_u64..30) {
            if let Wanted::Part { start, len } = wanted(Some(&range), size) {
                prop_assert!(len > 0 && start + len <= size);
            }
        }

        #[test]
        fn hostile_headers_never_panic(accept in "[a-z*;=,q. 0-9]{0,60}") {
            let _ = coding(&accept);
        }
    }
}
