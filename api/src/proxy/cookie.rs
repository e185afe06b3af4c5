//! Cookies of sandboxes whose pages have the origin of the control plane. Performs no I/O.

use axum::http::{HeaderMap, HeaderValue, header};

/// Browsers ignore longer attributes (RFC 6265bis, 5.6).
const ATTRIBUTE_MAX: usize = 1024;
/// A cookie with this prefix is valid only for the whole host (RFC 6265bis, 4.1.3.2).
const HOST_PREFIX: &[u8] = b"__host-";

/// Confines all cookies that a response sets to paths below `prefix`, and to this host. Removes cookies that can only
/// be valid for the whole host. `None` removes all cookies.
pub(super) fn confine(headers: &mut HeaderMap, prefix: Option<&str>) {
    let set: Vec<_> = match prefix {
        Some(prefix) => {
            let values = headers.get_all(header::SET_COOKIE).iter();
            values
                .filter_map(|value| confined(value.as_bytes(), prefix))
                .collect()
        }
        None => Vec::new(),
    };
    headers.remove(header::SET_COOKIE);
    for value in set {
        headers.append(header::SET_COOKIE, value);
    }
}

fn confined(cookie: &[u8], prefix: &str) -> Option<HeaderValue> {
    let mut parts = cookie.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
    let pair = parts.next()?;
    let is_of_host = pair
        .get(..HOST_PREFIX.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(HOST_PREFIX));
    if is_of_host {
        return None;
    }
    let (mut kept, mut path) = (pair.to_vec(), &b""[..]);
    for attribute in parts {
        let (name, value) = match attribute.iter().position(|byte| *byte == b'=') {
            Some(at) => (
                attribute[..at].trim_ascii(),
                attribute[at + 1..].trim_ascii(),
            ),
            None => (attribute, &b""[..]),
        };
        if name.eq_ignore_ascii_case(b"path") {
            // The last one counts. A path that does not start with a slash counts as absent.
            path = value;
        } else if !name.eq_ignore_ascii_case(b"domain") {
            kept.extend_from_slice(b"; ");
            kept.extend_from_slice(attribute);
        }
    }
    kept.extend_from_slice(b"; Path=");
    kept.extend_from_slice(prefix.as_bytes());
    let has_path = path.len() > 1 && path.starts_with(b"/");
    if has_path && prefix.len() + path.len() <= ATTRIBUTE_MAX {
        kept.extend_from_slice(path);
    }
    HeaderValue::from_bytes(&kept).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "/sandbox/iabcdefghij012345678/80";

    fn after(set: &[&str], prefix: Option<&str>) -> Vec<String> {
        let mut headers = HeaderMap::new();
        for value in set {
            let value = HeaderValue::from_str(value).unwrap();
            headers.append(header::SET_COOKIE, value);
        }
        confine(&mut headers, prefix);
        let values = headers.get_all(header::SET_COOKIE).iter();
        values
            .map(|value| value.to_str().unwrap().replace(PREFIX, "PREFIX"))
            .collect()
    }

    #[test]
    fn a_cookie_is_sent_only_below_the_prefix_of_its_sandbox() {
        let long = "/x".repeat(600);
        for (set, expected) in [
            ("a=b", "a=b; Path=PREFIX"),
            ("a=b; Path=/", "a=b; Path=PREFIX"),
            (
                "a=b;path = /x/y ;HttpOnly",
                "a=b; HttpOnly; Path=PREFIX/x/y",
            ),
            ("a=b; Path=/x; PATH=/y", "a=b; Path=PREFIX/y"),
            ("a=b; Path=/x; Path", "a=b; Path=PREFIX"),
            ("a=b; Path=x", "a=b; Path=PREFIX"),
            (&format!("a=b; Path={long}"), "a=b; Path=PREFIX"),
            (
                "a=b; Domain=.test; domain=e2b.test; Max-Age=9; Secure; SameSite=Lax",
                "a=b; Max-Age=9; Secure; SameSite=Lax; Path=PREFIX",
            ),
            ("a=\"b; Path=/\"; Domain", "a=\"b; Path=PREFIX/\""),
            ("__Secure-a=b; Secure", "__Secure-a=b; Secure; Path=PREFIX"),
            ("", "; Path=PREFIX"),
        ] {
            assert_eq!(after(&[set], Some(PREFIX)), [expected], "{set}");
        }
    }

    #[test]
    fn a_cookie_of_the_whole_host_is_removed() {
        let set = [
            "a=1",
            "__Host-a=1; Secure; Path=/",
            " __HOST-http-a=1; Secure; Path=/",
            "b=2",
        ];
        let expected = ["a=1; Path=PREFIX", "b=2; Path=PREFIX"];
        assert_eq!(after(&set, Some(PREFIX)), expected);
        assert!(after(&set, None).is_empty());
    }
}
