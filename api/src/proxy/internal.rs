//! Routes that are not for every client: those of the agent that belong to this server (`/init` hands out identities
//! and needs no token), and the interpreter's that runs code.
//!
//! They are found however their path is spelled. The servers behind only know the plain spelling, so this
//! refuses more than would reach them; what must never happen is that it refuses less.

/// Last words of paths that no client may ask for.
const ROUTES: [&str; 7] = [
    "init", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw", "upgrade",
];
/// The one word of the interpreter's path that runs code.
const CODE: [&str; 1] = ["execute"];
/// How often an encoded path is decoded: whoever encodes more often is refused.
const ROUNDS: usize = 4;

/// Whether a request path (without its query) means an internal route of the agent.
pub(super) fn is_internal(path: &str) -> bool {
    means(path, &ROUTES)
}

/// Whether a request path (without its query) means the interpreter's route that runs code.
pub(super) fn runs_code(path: &str) -> bool {
    means(path, &CODE)
}

/// Whether any spelling of a path is one of these single words. A path that is still encoded after [`ROUNDS`] counts
/// as one.
fn means(path: &str, routes: &[&str]) -> bool {
    let mut decoded = path.as_bytes().to_vec();
    for _ in 0..ROUNDS {
        if names_route(&decoded, routes) {
            return true;
        }
        match decode(&decoded) {
            Some(next) => decoded = next,
            None => return false,
        }
    }
    true
}

/// One round of percent-decoding; `None` when there is nothing to decode. Broken escapes stay as they are.
fn decode(path: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(path.len());
    let mut rest = path;
    let mut changed = false;
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = match (first, tail) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)),
            _ => None,
        };
        match escaped {
            Some((high, low)) => {
                decoded.push(high << 4 | low);
                rest = tail.get(2..).unwrap_or_default();
                changed = true;
            }
            None => {
                decoded.push(first);
                rest = tail;
            }
        }
    }
    changed.then_some(decoded)
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit)
        .to_digit(16)
        .and_then(|value| u8::try_from(value).ok())
}

/// Compares after what servers do to paths: empty and dot segments, backslashes, parameters, queries, case.
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
    fn every_spelling_is_found() {
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
    fn the_public_routes_are_not() {
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
    fn the_route_that_runs_code_is_found() {
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
        fn no_encoding_of_a_route_passes(which in 0..ROUTES.len(), encode: [bool; 8], slashes in 1usize..4) {
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
        fn any_path_is_decided(path in "\\PC{0,64}") {
            is_internal(&path);
        }

        #[test]
        fn deeper_paths_pass(first in "[a-z]{1,8}", second in "[a-z]{1,8}") {
            let path = format!("/{first}/{second}");
            prop_assert!(!is_internal(&path));
        }
    }
}
