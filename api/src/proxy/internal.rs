//! Recognizes restricted routes: internal routes of the agent, which are for this server only (`/init` assigns
//! identities and needs no token), and the interpreter's route that runs code.
//!
//! A route is recognized in every spelling of its path. The servers in the guest recognize only the plain spelling, so
//! this module may restrict too many paths, but never too few.

use std::borrow::Cow;

use percent_encoding::percent_decode;

/// Internal routes of the agent, as single path segments.
const ROUTES: [&str; 7] = [
    "init", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw", "upgrade",
];
/// The interpreter's route that runs code, as a single path segment.
const CODE: [&str; 1] = ["execute"];
/// How many times a path is compared, each time with one more layer of percent-encoding removed. A path with more
/// layers counts as restricted.
const ROUNDS: usize = 4;

/// Whether a request path, without its query, leads to an internal route of the agent.
pub(super) fn is_internal(path: &str) -> bool {
    means(path, &ROUTES)
}

/// Whether a request path, without its query, leads to the interpreter's route that runs code.
pub(super) fn runs_code(path: &str) -> bool {
    means(path, &CODE)
}

/// Whether `path` is some spelling of one of `routes`. A path that is still encoded after [`ROUNDS`] counts as such.
fn means(path: &str, routes: &[&str]) -> bool {
    let mut decoded = path.as_bytes().to_vec();
    for _ in 0..ROUNDS {
        if names_route(&decoded, routes) {
            return true;
        }
        // `Borrowed`: the path contains no valid escape, so it is fully decoded.
        match percent_decode(&decoded).into() {
            Cow::Owned(next) => decoded = next,
            Cow::Borrowed(_) => return false,
        }
    }
    true
}

/// Compares `path` after applying all normalizations that servers are known to apply: to empty and dot segments,
/// backslashes, path parameters, queries, fragments, NUL bytes and letter case.
fn names_route(path: &[u8], routes: &[&str]) -> bool {
    let text = String::from_utf8_lossy(path).to_ascii_lowercase();
    let text = text.split(['?', '#', '\0']).next().unwrap_or_default();
    let mut segments = Vec::new();
    for segment in text.split(['/', '\\']) {
        match segment.split(';').next().unwrap_or_default().trim() {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            name => segments.push(name),
        }
    }
    matches!(segments.as_slice(), [only] if routes.contains(only))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_spelling_of_an_internal_route_is_recognized() {
        for path in [
            "/init",
            "//init",
            "/init/",
            "/./init",
            "/x/../init",
            "/../init",
            "/%69nit",
            "/%2569nit",
            "/%25252569nit",
            "/%2finit",
            "/%2e%2e/init",
            "/INIT",
            "/init;x=1",
            "/init%3fx",
            "/init%00",
            "\\init",
            "init",
            "/fsthaw",
            "/upgrade",
        ] {
            assert!(is_internal(path), "{path}");
        }
    }

    #[test]
    fn public_routes_are_not_internal() {
        for path in [
            "/",
            "",
            "*",
            "/health",
            "/files",
            "/files/init",
            "/initx",
            "/process.Process/Start",
            "/100%",
            "/%zz",
        ] {
            assert!(!is_internal(path), "{path}");
        }
    }

    #[test]
    fn every_spelling_of_the_route_that_runs_code_is_recognized() {
        for path in [
            "/execute",
            "//execute/",
            "/%65xecute",
            "/Execute",
            "/a/../execute",
        ] {
            assert!(runs_code(path) && !is_internal(path), "{path}");
        }
        for path in [
            "/contexts",
            "/contexts/execute",
            "/executes",
            "/health",
            "/init",
        ] {
            assert!(!runs_code(path), "{path}");
        }
    }

    proptest! {
        #[test]
        fn every_encoding_of_an_internal_route_is_recognized(which in 0..ROUTES.len(), encode: [bool; 8], slashes in 1usize..4) {
            let mut path = "/".repeat(slashes);
            for (at, byte) in ROUTES[which].bytes().enumerate() {
                if encode[at] {
                    path.push_str(&format!("%{byte:02x}"));
                } else {
                    path.push(char::from(byte));
                }
            }
            prop_assert!(is_internal(&path), "{}", path);
        }

        #[test]
        fn no_path_panics(path in "\\PC{0,64}") {
            is_internal(&path);
        }

        #[test]
        fn paths_of_two_segments_are_not_internal(first in "[a-z]{1,8}", second in "[a-z]{1,8}") {
            let path = format!("/{first}/{second}");
            prop_assert!(!is_internal(&path));
        }
    }
}
