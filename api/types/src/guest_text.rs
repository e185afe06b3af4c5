//! Words of a guest as people and logs may see them.

/// The most characters of a guest's text that are shown.
pub const GUEST_TEXT_MAX: usize = 300;

/// Text that a guest, or a program that runs one, has a hand in, for a log line or an answer: at most
/// [`GUEST_TEXT_MAX`] characters, the last of them `…` if there was more; whatever would end the line, move the
/// cursor, hide or reorder text is written as an escape. What this returned is left as it is by a second call.
///
/// Every such text goes through here: a guest must neither write lines of the host's log nor decide how long they are.
#[must_use]
pub fn guest_text(text: &str) -> String {
    let mut shown = String::new();
    let mut left = GUEST_TEXT_MAX;
    // Where the text is cut if more of it comes.
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

/// A character as it is shown.
enum Escape {
    Plain(char),
    Escaped(std::char::EscapeDebug),
}

impl Escape {
    fn of(c: char) -> Self {
        match c {
            // `escape_debug` quotes these, which does no good here and would not stop at one call.
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
    fn a_line_stays_a_line_and_is_short() {
        assert_eq!(guest_text("no such user \"x\\y\""), "no such user \"x\\y\"");
        assert_eq!(guest_text("a\r\nb\tc\0"), "a\\r\\nb\\tc\\0");
        assert_eq!(guest_text("\u{1b}[2J\u{9b}"), "\\u{1b}[2J\\u{9b}");
        assert_eq!(
            guest_text("\u{202e}\u{2028}\u{200b}"),
            "\\u{202e}\\u{2028}\\u{200b}"
        );
        let exact = "é".repeat(GUEST_TEXT_MAX);
        assert_eq!(guest_text(&exact), exact);
        let long = guest_text(&"x".repeat(1 << 20));
        assert_eq!(long, format!("{}…", "x".repeat(GUEST_TEXT_MAX - 1)));
    }

    proptest! {
        #[test]
        fn whatever_a_guest_says_is_one_short_line(text in any::<String>(), times in 1_usize..60) {
            let shown = guest_text(&text.repeat(times));
            prop_assert!(shown.chars().count() <= GUEST_TEXT_MAX);
            prop_assert!(!shown.contains(char::is_control));
            let hidden = ['\u{2028}', '\u{2029}', '\u{202e}', '\u{200b}'];
            prop_assert!(!shown.contains(hidden));
            prop_assert_eq!(guest_text(&shown), shown);
        }
    }
}
