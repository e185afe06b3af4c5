//! Header values with parameters: `form-data; name="file"; filename="/a b"` (RFC 9110, 5.6.6; RFC 8187 for
//! `filename*`). Pure.

/// A value and its parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MediaType {
    /// The value, in lower case.
    pub(crate) value: String,
    /// Name (in lower case) and value, in the order of the header.
    parameters: Vec<(String, String)>,
}

impl MediaType {
    /// Reads a header up to the first malformed parameter.
    pub(crate) fn parse(header: &str) -> Self {
        let end = header.find(';').unwrap_or(header.len());
        let (value, mut rest) = header.split_at(end);
        let mut parameters = Vec::new();
        while let Some((name, text, after)) = parameter(rest) {
            parameters.push((name.to_ascii_lowercase(), text));
            rest = after;
        }
        Self {
            value: value.trim().to_ascii_lowercase(),
            parameters,
        }
    }

    /// A parameter by its lower-case name. The form with a character set (`name*`) takes precedence.
    pub(crate) fn parameter(&self, name: &str) -> Option<String> {
        let find = |wanted: &str| {
            let found = self.parameters.iter().find(|(name, _)| name == wanted);
            found.map(|(_, text)| text.as_str())
        };
        let extended = find(&format!("{name}*")).and_then(decode_extended);
        extended.or_else(|| find(name).map(str::to_owned))
    }
}

/// The parameter at the front of `; name=value; …`, and the rest.
fn parameter(text: &str) -> Option<(&str, String, &str)> {
    let text = text.strip_prefix(';')?;
    let (name, value) = text.split_once('=')?;
    let name = name.trim();
    if name.is_empty() || name.contains([';', '"', ' ']) {
        return None;
    }
    match value.trim_start().strip_prefix('"') {
        Some(quoted) => {
            let (text, rest) = quoted_string(quoted)?;
            Some((name, text, rest.trim_start()))
        }
        None => {
            let end = value.find(';').unwrap_or(value.len());
            let (text, rest) = value.split_at(end);
            Some((name, text.trim().to_owned(), rest))
        }
    }
}

/// The text before the closing quote, and the rest. A backslash escapes only a quote or another backslash, because
/// Windows paths contain single ones.
fn quoted_string(text: &str) -> Option<(String, &str)> {
    let mut unquoted = String::new();
    let mut rest = text;
    loop {
        let at = rest.find(['"', '\\'])?;
        let (plain, special) = rest.split_at(at);
        unquoted.push_str(plain);
        let mut after = special.chars();
        match (after.next()?, after.clone().next()) {
            ('"', _) => return Some((unquoted, after.as_str())),
            (_, Some(escaped @ ('"' | '\\'))) => {
                unquoted.push(escaped);
                after.next();
            }
            (backslash, _) => unquoted.push(backslash),
        }
        rest = after.as_str();
    }
}

/// Decodes `utf-8'language'percent-encoded`.
fn decode_extended(text: &str) -> Option<String> {
    let mut parts = text.splitn(3, '\'');
    let charset = parts.next()?;
    let encoded = parts.nth(1)?;
    let known = charset.eq_ignore_ascii_case("utf-8") || charset.eq_ignore_ascii_case("us-ascii");
    known.then(|| transport::http::percent_decode(encoded))?
}

/// The `Content-Disposition` of a download: `inline; filename=…`.
pub(crate) fn content_disposition(name: &str) -> String {
    let is_token = |b: u8| b.is_ascii_alphanumeric() || b"!#$&+-.^_`|~".contains(&b);
    if !name.is_empty() && name.bytes().all(is_token) {
        return format!("inline; filename={name}");
    }
    let mut header = String::from("inline; filename*=utf-8''");
    for byte in name.bytes() {
        if is_token(byte) {
            header.push(char::from(byte))
        } else {
            header.push_str(&format!("%{byte:02X}"))
        }
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filename(header: &str) -> Option<String> {
        MediaType::parse(header).parameter("filename")
    }

    #[test]
    fn what_clients_write_is_read() {
        let parsed = MediaType::parse(r#"Form-Data; name="file"; Filename="/tmp/ä b.txt""#);
        assert_eq!(parsed.value, "form-data");
        assert_eq!(parsed.parameter("name").as_deref(), Some("file"));
        assert_eq!(
            parsed.parameter("filename").as_deref(),
            Some("/tmp/ä b.txt")
        );
        let kind = MediaType::parse("multipart/form-data;boundary=abc ; charset=utf-8");
        assert_eq!(kind.parameter("boundary").as_deref(), Some("abc"));
        for (header, name) in [
            (r#"f; filename="a;b""#, Some("a;b")),
            (r#"f; filename="a\"b\\c\d""#, Some(r#"a"b\c\d"#)),
            (r#"f; filename="open"#, None),
            (r#"f; filename="%22""#, Some("%22")),
            ("f; filename*=UTF-8''%C3%A4%20b; filename=x", Some("ä b")),
            ("f; filename*=latin1''%E4; filename=x", Some("x")),
            ("f; filename*=utf-8''%FF; filename=x", Some("x")),
            ("f; filename=", Some("")),
            ("f; x; filename=a", None),
            ("f", None),
        ] {
            assert_eq!(filename(header).as_deref(), name, "{header}");
        }
    }

    proptest! {
        #[test]
        fn hostile_headers_never_panic(header in r#"[a-z;="\\*'% ä-]{0,40}"#) {
            let _ = MediaType::parse(&header).parameter("filename");
        }

        #[test]
        fn names_of_downloads_survive(name in r"[^\x00/]{1,20}") {
            let header = content_disposition(&name);
            prop_assert!(header.is_ascii());
            prop_assert_eq!(filename(&header), Some(name));
        }
    }
}
