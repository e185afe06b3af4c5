//! Sanitizes text from guests before it is logged or shown to users.

/// Length limit of sanitized text in characters.
pub const GUEST_TEXT_MAX: usize = 300;

/// Sanitizes text that a guest, or a program that runs guest code, can influence. The result has at most
/// [`GUEST_TEXT_MAX`] characters and ends in `…` if text was cut. Characters that would end the line, move the cursor,
/// or hide or reorder text are escaped. Sanitizing sanitized text does not change it.
///
/// All such text must pass through this function before it is logged or returned: a guest must not be able to forge
/// lines in the host's log, or to write lines of arbitrary length to it.
#[must_use]
pub fn guest_text(text: &str) -> String {
    let mut shown = String::new();
    let mut left = GUEST_TEXT_MAX;
    // Length in bytes of the text that is kept, before `…`, if the rest does not fit.
    let mut cut = 0;
    for escape in text.chars().map(Escape::of) {
        let len = escape.len();
        if len > left {
            shown.truncate(cut);
            shown.push('…');
            break;
        }
        escape.push_to(&mut shown);
        left -= len;
        if left > 0 {
            cut = shown.len();
        }
    }
    shown
}

/// Escapes characters as [`guest_text`] does, in text of any length.
#[must_use]
pub fn one_line(text: &str) -> String {
    let mut shown = String::new();
    text.chars().for_each(|c| Escape::of(c).push_to(&mut shown));
    shown
}

/// A character in its sanitized form.
enum Escape {
    Plain(char),
    Escaped(std::char::EscapeDebug),
}

impl Escape {
    fn of(c: char) -> Self {
        match c {
            // `escape_debug` would escape these too. They are harmless, and a second pass would escape their
            // backslashes again.
            '\\' | '\'' | '"' => Self::Plain(c),
            _ => Self::Escaped(c.escape_debug()),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Plain(_) => 1,
            Self::Escaped(escape) => escape.len(),
        }
    }

    fn push_to(self, shown: &mut String) {
        match self {
            Self::Plain(c) => shown.push(c),
            Self::Escaped(escape) => shown.extend(escape),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sanitized_text_is_one_short_line() {
        assert_eq!(guest_text("no such user \"x\\y\""), "no such user \"x\\y\"");
        assert_eq!(guest_text("a\r\nb\tc\0"), "a\\r\\nb\\tc\\0");
        assert_eq!(guest_text("\u{1b}[2J\u{9b}"), "\\u{1b}[2J\\u{9b}");
        assert_eq!(
            guest_text("\u{202e}\u{2028}\u{200b}"),
            "\\u{202e}\\u{2028}\\u{200b}"
        );
        let text = format!("{}\n\u{9b}\u{202e}", "x".repeat(1000));
        let shown = format!("{}\\n\\u{{9b}}\\u{{202e}}", "x".repeat(1000));
        assert_eq!((one_line(&text), one_line(&shown)), (shown.clone(), shown));
        let exact = "é".repeat(GUEST_TEXT_MAX);
        assert_eq!(guest_text(&exact), exact);
        let long = guest_text(&"x".repeat(1 << 20));
        assert_eq!(long, format!("{}…", "x".repeat(GUEST_TEXT_MAX - 1)));
    }

    proptest! {
        #[test]
        fn any_text_becomes_one_short_line_without_control_characters(text in any::<String>(), times in 1_usize..60) {
            let shown = guest_text(&text.repeat(times));
            prop_assert!(shown.chars().count() <= GUEST_TEXT_MAX);
            prop_assert!(!shown.contains(char::is_control));
            let hidden = ['\u{2028}', '\u{2029}', '\u{202e}', '\u{200b}'];
            prop_assert!(!shown.contains(hidden));
            prop_assert_eq!(guest_text(&shown), shown);
        }
    }
}
