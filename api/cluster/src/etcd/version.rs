//! Which releases of etcd can be used.

/// Oldest usable release. 3.5.0 to 3.5.2 corrupt data, and before 3.5.13 a former leader may revoke leases that have
/// been renewed since (etcd-io/etcd 15247).
const OLDEST: (u64, u64, u64) = (3, 5, 13);

/// Whether a release such as `3.5.16` can be used. False for malformed versions.
pub(crate) fn check_version(version: &str) -> bool {
    let number = version
        .split_once('-')
        .map_or(version, |(number, _)| number);
    let parts: Vec<Option<u64>> = number.split('.').map(|part| part.parse().ok()).collect();
    match parts[..] {
        [Some(major), Some(minor), Some(patch)] => (major, minor, patch) >= OLDEST && major == 3,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn releases_before_3_5_13_are_refused() {
        for (version, expected) in [
            ("3.5.13", true),
            ("3.5.16", true),
            ("3.6.0-rc.1", true),
            ("3.5.12", false),
            ("3.5.2", false),
            ("3.4.36", false),
            ("4.0.0", false),
            ("3.5", false),
            ("", false),
        ] {
            assert_eq!(super::check_version(version), expected, "{version}");
        }
    }
}
