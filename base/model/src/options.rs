//! Lines of the server's options file: one option of `cube-api serve` each, without its dashes.
//!
//! ```text
//! # A comment.
//! max-sandboxes = 64
//! insecure-loopback
//! ```

/// The options file of an installed server.
pub const OPTIONS_FILE: &str = "/etc/cube/server.conf";

/// The configuration file of an installed server.
pub const CONFIG_FILE: &str = "/etc/cube/cube.toml";

/// The default state directory of a server.
pub const STATE_DIR: &str = "/var/lib/cube";

/// A line is not an option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {number}: {line:?} is not an option: write `name = value` as in `max-sandboxes = 64`, or the name alone if it \
     has no value"
)]
pub struct BadOption {
    /// Line number, counted from 1.
    pub number: usize,
    pub line: String,
}

/// Parses the options in the text of an options file. Returns names, and values if present.
///
/// # Errors
/// Returns [`BadOption`] for the first line that is not an option.
pub fn options(text: &str) -> Result<Vec<(&str, Option<&str>)>, BadOption> {
    let mut found = Vec::new();
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name.trim(), Some(value.trim())),
            None => (line, None),
        };
        let is_name = name.starts_with(|c: char| c.is_ascii_lowercase())
            && (name.chars()).all(|c| c.is_ascii_lowercase() || c == '-');
        if !is_name || name == "config" {
            let line = line.to_owned();
            return Err(BadOption { number, line });
        }
        found.push((name, value));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_names_and_values() {
        let text = "# comment\n\n  max-sandboxes = 64\ninsecure-loopback\nimage-mirror = a=http://b?c=d\ndomain=\n";
        assert_eq!(
            options(text).unwrap(),
            [
                ("max-sandboxes", Some("64")),
                ("insecure-loopback", None),
                ("image-mirror", Some("a=http://b?c=d")),
                ("domain", Some("")),
            ]
        );
        for wrong in [
            "--rate 5",
            "max sandboxes = 1",
            "= 5",
            "config = /x",
            "-v",
            "Rate = 1",
        ] {
            let why = options(&format!("rate = 1\n{wrong}\n")).unwrap_err();
            assert_eq!((why.number, why.line.as_str()), (2, wrong));
        }
    }
}
