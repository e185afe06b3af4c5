//! Code blocks and links of Markdown, as far as this repository's documents use it.

/// A block between two fences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CodeBlock {
    /// Line of the first fence, counted from 1.
    pub(crate) line: usize,
    /// Text after the first fence in its line.
    pub(crate) info: String,
    pub(crate) text: String,
}

/// A piece of text and the line in which it begins, counted from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Located {
    pub(crate) line: usize,
    pub(crate) text: String,
}

/// The blocks of a document. An unclosed block does not count.
pub(crate) fn code_blocks(document: &str) -> Vec<CodeBlock> {
    let mut blocks = Vec::new();
    let mut open: Option<CodeBlock> = None;
    for (line, text, in_block) in numbered(document) {
        match open.take() {
            _ if in_block && is_fence(text) => {
                open = Some(CodeBlock {
                    line,
                    info: text.trim_start().trim_start_matches('`').to_owned(),
                    text: String::new(),
                });
            }
            Some(block) if !in_block => blocks.push(block),
            Some(mut block) => {
                block.text.push_str(text);
                block.text.push('\n');
                open = Some(block);
            }
            None => {}
        }
    }
    blocks
}

/// Lines with their numbers, and whether each is inside a code block. The first fence counts as inside, the last
/// one does not.
pub(crate) fn numbered(document: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut in_block = false;
    document.lines().enumerate().map(move |(index, text)| {
        if is_fence(text) {
            in_block = !in_block;
        }
        (index + 1, text, in_block)
    })
}

pub(crate) fn is_fence(line: &str) -> bool {
    line.trim_start().starts_with("```")
}

/// Targets of links to files of this repository, without fragments.
pub(crate) fn links(document: &str) -> Vec<Located> {
    let mut links = Vec::new();
    for (line, text) in prose(document) {
        for rest in text.split("](").skip(1) {
            let target = rest.split(')').next().unwrap_or_default();
            let target = target.split('#').next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") {
                links.push(Located {
                    line,
                    text: target.to_owned(),
                });
            }
        }
    }
    links
}

pub(crate) fn prose(document: &str) -> impl Iterator<Item = (usize, &str)> {
    numbered(document)
        .filter(|(_, text, in_block)| !in_block && !is_fence(text))
        .map(|(line, text, _)| (line, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_a_line_an_info_string_and_a_text() {
        let document = "a\n```sh e2b\nx\n\ny\n```\n- b\n  ```\n  z\n  ```\n```\nopen\n";
        let found: Vec<_> = code_blocks(document)
            .into_iter()
            .map(|block| (block.line, block.info, block.text))
            .collect();
        let block = |line, info: &str, text: &str| (line, info.to_owned(), text.to_owned());
        assert_eq!(
            found,
            [block(2, "sh e2b", "x\n\ny\n"), block(8, "", "  z\n")]
        );
    }

    #[test]
    fn links_are_found_outside_blocks_without_their_fragments() {
        let document = "[l](m.md#n) [x](https://a)\n```\n[b](c.md)\n```\n[d](#e)\n";
        let found: Vec<_> = links(document).into_iter().map(|one| one.text).collect();
        assert_eq!(found, ["m.md"]);
    }
}
