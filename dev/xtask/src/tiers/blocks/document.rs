//! Command blocks of one document.

use clap::ValueEnum;

use crate::{
    markdown::{CodeBlock, code_blocks},
    tiers::Tier,
};

/// The language of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Language {
    /// Commands.
    Sh,
    /// Commands after a prompt, `# ` or `$ `, and their output.
    Console,
    Python,
    Js,
}

/// Expected end of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// With exit code 0.
    Success,
    /// With exit code 0, or 5 if the host was too busy for a measurement.
    Measured,
    /// With the next server or the end of the document; the server is available to the blocks after it.
    Server,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    pub(super) document: String,
    /// Line of the fence, counted from 1.
    pub(super) line: usize,
    pub(super) language: Language,
    pub(super) tier: Tier,
    pub(super) end: End,
    pub(super) text: String,
    /// Its expected standard output, from the `text` block after it. `…` stands for any text, or alone in a line
    /// for any lines.
    pub(super) prints: Option<String>,
}

impl Block {
    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.document, self.line)
    }

    pub(super) fn first_line(&self) -> &str {
        self.text.lines().next().unwrap_or_default()
    }

    /// The commands of a shell, without comments. Empty for programs in other languages.
    pub(super) fn commands(&self) -> Vec<String> {
        let bare = |line: &str| {
            line.split(" #")
                .next()
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        match self.language {
            Language::Sh => self
                .text
                .lines()
                .map(bare)
                .filter(|l| !l.is_empty())
                .collect(),
            Language::Console => exchanges(&self.text)
                .into_iter()
                .map(|(c, _)| bare(&c))
                .collect(),
            Language::Python | Language::Js => Vec::new(),
        }
    }
}

/// The commands of a `console` block, each with its output.
pub(super) fn exchanges(text: &str) -> Vec<(String, String)> {
    let mut exchanges: Vec<(String, String)> = Vec::new();
    for line in text.lines() {
        match (
            line.strip_prefix("# ").or(line.strip_prefix("$ ")),
            exchanges.last_mut(),
        ) {
            (Some(command), _) => exchanges.push((command.to_owned(), String::new())),
            (None, Some((_, output))) => {
                output.push_str(line);
                output.push('\n');
            }
            (None, None) => {}
        }
    }
    exchanges
}

/// The blocks of a document.
#[derive(Debug, Default)]
pub(super) struct Document {
    pub(super) blocks: Vec<Block>,
    /// One sentence for each command block that names no tier.
    pub(super) unmarked: Vec<String>,
    /// One sentence for each block that names a tier but cannot be run.
    pub(super) wrong: Vec<String>,
}

impl Document {
    pub(super) fn read(name: &str, text: &str) -> Self {
        let mut document = Self::default();
        // Whether the previous block can have an output block.
        let mut is_program = false;
        for fence in code_blocks(text) {
            let place = format!("{name}:{}", fence.line);
            let words: Vec<&str> = fence.info.split_whitespace().collect();
            let language = match words.first().copied() {
                Some("sh") | None => Language::Sh,
                Some("console") => Language::Console,
                Some("python") => Language::Python,
                Some("js") => Language::Js,
                Some("text") => {
                    document.output(&fence, is_program);
                    is_program = false;
                    continue;
                }
                // A file that is only shown.
                Some(_) => continue,
            };
            is_program = false;
            let tier = match words.get(1) {
                None => {
                    document.unmarked.push(format!("{place}: names no tier"));
                    continue;
                }
                Some(tier) => Tier::from_str(tier, false),
            };
            let end = match words.get(2..) {
                Some([]) | None => Ok(End::Success),
                Some(["measures"]) if language == Language::Sh => Ok(End::Measured),
                Some(["server"]) if language == Language::Sh => Ok(End::Server),
                Some(others) => Err(format!("{others:?} is neither `server` nor `measures`")),
            };
            match (tier, end) {
                (Ok(tier @ (Tier::E2b | Tier::Package | Tier::Bench)), Ok(end)) => {
                    is_program = true;
                    document.blocks.push(Block {
                        document: name.to_owned(),
                        line: fence.line,
                        language,
                        tier,
                        end,
                        text: fence.text,
                        prints: None,
                    });
                }
                (Ok(tier), Ok(_)) => document
                    .wrong
                    .push(format!("{place}: the tier {tier} runs no blocks")),
                (Err(_), _) => document
                    .wrong
                    .push(format!("{place}: there is no tier {:?}", words[1])),
                (_, Err(why)) => document.wrong.push(format!("{place}: {why}")),
            }
        }
        document
    }

    /// Handles a `text` block. After a block that is run, it is the output of that block; elsewhere, it is
    /// unmarked.
    fn output(&mut self, fence: &CodeBlock, is_program: bool) {
        match self.blocks.last_mut() {
            Some(block) if is_program => block.prints = Some(fence.text.clone()),
            Some(_) | None => self
                .unmarked
                .push(format!("line {}: output of no program", fence.line)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_a_tier_an_output_and_a_place() {
        let text = "a\n```sh e2b server\nserve &\n```\n```python e2b\nprint(1)\n```\nprints\n```text\n1\n```\n```toml\nx = 1\n```\n";
        let document = Document::read("a.md", text);
        assert!(
            document.wrong.is_empty() && document.unmarked.is_empty(),
            "{document:?}"
        );
        let [server, program] = &document.blocks[..] else {
            panic!("{document:?}")
        };
        assert_eq!(
            (server.end, server.place().as_str()),
            (End::Server, "a.md:2")
        );
        assert_eq!(program.prints.as_deref(), Some("1\n"));
        assert_eq!(program.language, Language::Python);
    }

    #[test]
    fn a_console_has_commands_and_their_output() {
        let found = exchanges("# cube run -- true\n# cube list\nA\nB\n");
        assert_eq!(found[0], ("cube run -- true".to_owned(), String::new()));
        assert_eq!(found[1].1, "A\nB\n");
    }
}
