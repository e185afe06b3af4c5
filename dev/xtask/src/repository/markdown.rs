//! Reads code spans and code blocks from Markdown, as far as this repository's documents use them.

use crate::markdown::{Located, is_fence, numbered, prose};

/// The code spans outside code blocks. A span may continue on the next line, but not in the next paragraph or row.
pub(super) fn code_spans(document: &str) -> Vec<Located> {
    let mut spans = Vec::new();
    let mut open: Option<Located> = None;
    for (line, text) in prose(document) {
        if text.trim().is_empty() || text.starts_with('|') {
            open = None;
        }
        for (index, part) in text.split('`').enumerate() {
            if index > 0 {
                open = match open.take() {
                    Some(span) => {
                        spans.push(span);
                        None
                    }
                    None => Some(Located {
                        line,
                        text: String::new(),
                    }),
                };
            }
            if let Some(span) = &mut open {
                span.text.push_str(part.trim_start());
            }
        }
        if let Some(span) = &mut open {
            span.text.push(' ');
        }
    }
    spans
}

/// The lines of code blocks.
pub(super) fn code_block_lines(document: &str) -> Vec<Located> {
    let lines = numbered(document).filter(|(_, text, in_block)| *in_block && !is_fence(text));
    lines
        .map(|(line, text, _)| Located {
            line,
            text: text.to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(located: &[Located]) -> Vec<&str> {
        located.iter().map(|one| one.text.as_str()).collect()
    }

    #[test]
    fn spans_and_blocks_are_found() {
        let document =
            "A `b/c` and `d\n  e`.\n\n```\n`x` y\n```\n| a | b |\n|---|---|\n| `p` | `q`, `r` |\n";
        assert_eq!(texts(&code_spans(document)), ["b/c", "d e", "p", "q", "r"]);
        assert_eq!(texts(&code_block_lines(document)), ["`x` y"]);
        assert_eq!(code_spans(document)[1].line, 1);
    }
}
