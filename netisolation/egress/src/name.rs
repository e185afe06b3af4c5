//! Host names as the proxy compares them. All names from TLS, HTTP and DNS go through [`HostName::parse`], so that two
//! spellings of one name are equal and an address is never accepted as a name.

use std::fmt;

/// A DNS name in lower case, without trailing dot. Never an IP address in any spelling.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(String);

/// Reason why a text is not a host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("the host name is empty")]
    Empty,
    #[error("the host name is longer than 253 bytes, or one of its labels longer than 63")]
    TooLong,
    #[error("the host name has a byte that is not a letter, digit, hyphen or underscore")]
    Byte,
    #[error("a label of the host name is empty, or begins or ends with a hyphen")]
    Label,
    #[error("the host is an IP address")]
    Address,
    #[error("the port is not a number between 1 and 65535")]
    Port,
}

impl HostName {
    /// # Errors
    /// Returns a [`NameError`] unless `text` is a DNS name of ASCII letters, digits, hyphens and underscores. One trailing
    /// dot is removed.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let name = text.strip_suffix('.').unwrap_or(text);
        if name.is_empty() {
            return Err(NameError::Empty);
        }
        if name.starts_with('[') || name.parse::<std::net::IpAddr>().is_ok() {
            return Err(NameError::Address);
        }
        if name.len() > 253 {
            return Err(NameError::TooLong);
        }
        name.split('.').try_for_each(check_label)?;
        // Resolvers and URL parsers read `127.1`, `2130706433` and `0x7f.0.0.1` as IPv4 addresses. No top-level domain is a
        // number (RFC 3696, section 2).
        let last = name.rsplit('.').next().unwrap_or(name);
        if is_number(last) {
            return Err(NameError::Address);
        }
        Ok(Self(name.to_ascii_lowercase()))
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn check_label(label: &str) -> Result<(), NameError> {
    if label.is_empty() || label.starts_with('-') || label.ends_with('-') {
        return Err(NameError::Label);
    }
    if label.len() > 63 {
        return Err(NameError::TooLong);
    }
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if label.bytes().all(allowed) {
        Ok(())
    } else {
        Err(NameError::Byte)
    }
}

fn is_number(label: &str) -> bool {
    let hex = label.strip_prefix("0x").or(label.strip_prefix("0X"));
    label.bytes().all(|byte| byte.is_ascii_digit())
        || hex.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The content of a header `Host` or of `:authority`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    pub name: HostName,
    /// `None`: the default port of the scheme.
    pub port: Option<u16>,
}

impl HostPort {
    /// # Errors
    /// Returns a [`NameError`] for anything but `name` and `name:port`, such as user information before the name.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        if text.starts_with('[') {
            return Err(NameError::Address);
        }
        let (name, port) = match text.split_once(':') {
            Some((name, port)) => (name, Some(parse_port(port)?)),
            None => (text, None),
        };
        let name = HostName::parse(name)?;
        Ok(Self { name, port })
    }
}

/// Digits only: `u16::from_str` would accept a sign.
fn parse_port(text: &str) -> Result<u16, NameError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(NameError::Port);
    }
    match text.parse() {
        Ok(0) | Err(_) => Err(NameError::Port),
        Ok(port) => Ok(port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_name_are_equal() {
        let name = HostName::parse("api.example.com").unwrap();
        for text in ["API.Example.COM", "api.example.com.", "Api.example.com."] {
            assert_eq!(HostName::parse(text).unwrap(), name, "{text}");
        }
        let punycode = HostName::parse("XN--bcher-KVA.example").unwrap();
        assert_eq!(punycode.as_str(), "xn--bcher-kva.example");
        assert!(HostName::parse("_dmarc.example.com").is_ok());
    }

    #[test]
    fn addresses_are_not_names() {
        for text in [
            "127.0.0.1",
            "127.0.0.1.",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0X7F.1",
            "0177.0.0.1",
            "a.0x",
            "::1",
            "[::1]",
            "example.1",
        ] {
            assert_eq!(HostName::parse(text), Err(NameError::Address), "{text}");
        }
    }

    #[test]
    fn other_texts_are_not_names() {
        let long = "a".repeat(64);
        for text in [
            "",
            ".",
            "a..b",
            "a..",
            ".a",
            "-a.b",
            "a-.b",
            "a b",
            "a/b",
            "a@b",
            "a%2eb",
            "b\u{fc}cher.example",
            "a\0b",
            "a\r\nb",
            "*.example.com",
            &long,
            &vec!["a"; 128].join("."),
        ] {
            assert!(HostName::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_port_is_digits() {
        assert_eq!(HostPort::parse("a.b:443").unwrap().port, Some(443));
        assert_eq!(HostPort::parse("a.b").unwrap().port, None);
        for text in [
            "a.b:",
            "a.b:+1",
            "a.b:0",
            "a.b:65536",
            "a.b:1:2",
            "u@a.b",
            "u:p@a.b",
            "[::1]:80",
            "a.b:80 ",
        ] {
            assert!(HostPort::parse(text).is_err(), "{text}");
        }
    }
}
