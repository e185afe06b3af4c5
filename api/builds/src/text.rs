//! Text of build commands, registries and images as clients see it.

/// Maximum length of a message to a client in bytes. Longer ones are cut.
pub(super) const MAX_MESSAGE: usize = 4096;

/// The text without terminal sequences, control characters and characters that reorder text, cut after `most` bytes.
/// Tabs stay.
#[must_use]
pub fn plain(text: &str, most: usize) -> String {
    let mut shown = String::with_capacity(text.len().min(most));
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c == '\x1b' {
            rest = after_sequence(rest);
        } else if c == '\t' || !is_hidden(c) {
            if shown.len() + c.len_utf8() > most {
                shown.push('…');
                break;
            }
            shown.push(c);
        }
    }
    shown
}

/// The text after a terminal sequence (ECMA-48, 5.4 and 8.3.89) whose ESC has been read.
fn after_sequence(rest: std::str::Chars<'_>) -> std::str::Chars<'_> {
    let mut after = rest.clone();
    match after.next() {
        // Parameters and intermediates up to a final byte.
        Some('[') => {
            let mut seen = after.clone();
            while let Some(c) = seen.next() {
                match c {
                    '\x40'..='\x7e' => return seen,
                    '\x20'..='\x3f' => after = seen.clone(),
                    _ => break,
                }
            }
            after
        }
        // A string up to BEL or ESC \. Without a terminator, only the introducer is dropped.
        Some(']' | 'P' | 'X' | '^' | '_') => {
            let text = after.as_str();
            let bell = text.find('\x07').map(|at| at + 1);
            let end = text.find("\x1b\\").map(|at| at + 2);
            let end = match (bell, end) {
                (Some(bell), Some(end)) => bell.min(end),
                (one, other) => one.or(other).unwrap_or(0),
            };
            text[end..].chars()
        }
        // A sequence of two characters.
        Some('\x20'..='\x7e') => after,
        _ => rest,
    }
}

/// Controls, and characters that reorder or hide other text (Unicode Standard Annex 9, 2).
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn terminal_sequences_are_left_out() {
        for (text, shown) in [
            ("\x1b[1;31mred\x1b[0m", "red"),
            ("a\x1b]0;title\x07b", "ab"),
            ("a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
            ("a\x1b(Bb", "aBb"),
            ("tab\tkept", "tab\tkept"),
            ("bell\x07, \u{202e}order", "bell, order"),
            ("\x1b[31", ""),
            ("\x1b", ""),
            ("\x1b]never ends", "never ends"),
            ("grüße", "grüße"),
        ] {
            assert_eq!(plain(text, 100), shown, "{text:?}");
        }
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(plain("aüb", 2), "a…");
        assert_eq!(plain("aüb", 4), "aüb");
    }

    proptest! {
        #[test]
        fn nothing_hidden_is_left(text in "(\\PC|\\x1b|\\[|\\]|[\\x00-\\x1f]|\u{202e}){0,60}", most in 0_usize..80) {
            let shown = plain(&text, most);
            prop_assert!(shown.chars().all(|c| c == '\t' || !is_hidden(c)), "{:?}", shown);
            prop_assert!(shown.len() <= most + '…'.len_utf8());
        }
    }
}
