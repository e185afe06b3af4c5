//! From the text of a Dockerfile to its instructions.

use std::collections::BTreeMap;

use super::words::{self, Words};

/// An instruction that matters to a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Instruction {
    From(String),
    /// A step that the server has too, and its arguments.
    Step(&'static str, Vec<String>),
    Copy {
        from: Vec<String>,
        to: String,
        /// Empty: the user of the step.
        owner: String,
        /// Empty: that of the file.
        mode: String,
    },
    Entrypoint(Words),
    Cmd(Words),
}

/// The number of a line, and what is wrong there.
type Wrong = (usize, String);

/// The instructions, with the numbers of their first lines.
pub(super) fn parse(text: &str) -> Result<Vec<(usize, Instruction)>, Wrong> {
    let (mut found, mut arguments) = (Vec::new(), BTreeMap::new());
    let mut lines = text.lines().zip(1_usize..);
    while let Some((line, number)) = lines.next() {
        if is_comment(line) || line.trim().is_empty() {
            continue;
        }
        let mut whole = line.trim_start().to_owned();
        while let Some(rest) = whole.trim_end().strip_suffix('\\') {
            whole = rest.trim_end().to_owned();
            // Comments between the lines of an instruction are left out.
            match lines.find(|(next, _)| !is_comment(next)) {
                Some((next, _)) => whole = format!("{whole} {}", next.trim_start()),
                None => break,
            }
        }
        let (name, rest) = whole
            .split_once(char::is_whitespace)
            .unwrap_or((&whole, ""));
        let name = name.to_ascii_uppercase();
        let heredoc = (name == "RUN").then(|| heredoc_end(rest)).flatten();
        let rest = match heredoc {
            None => rest.trim().to_owned(),
            Some(end) => {
                let body = lines.by_ref().map(|(line, _)| line);
                body.take_while(|line| line.trim() != end)
                    .collect::<Vec<_>>()
                    .join("\n")
            }
        };
        let is_first = found.is_empty();
        let parsed = instruction(&name, &rest, is_first, &mut arguments);
        found.extend(
            parsed
                .map_err(|why| (number, why))?
                .map(|one| (number, one)),
        );
    }
    Ok(found)
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with('#')
}

/// The word that ends the lines of `RUN <<EOF`.
fn heredoc_end(rest: &str) -> Option<String> {
    let word = rest.trim().strip_prefix("<<")?;
    let word = word.trim_start_matches('-').trim_matches(['"', '\'']);
    let is_word = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_word.then(|| word.to_owned())
}

/// `None`: it does not change what is built.
fn instruction(
    name: &str,
    rest: &str,
    is_first: bool,
    arguments: &mut BTreeMap<String, String>,
) -> Result<Option<Instruction>, String> {
    let step = |name, args| Ok(Some(Instruction::Step(name, args)));
    match name {
        "FROM" => from(rest, arguments).map(Some),
        "ARG" if is_first => {
            let given = words::pairs(rest)?.into_iter();
            arguments.extend(given.filter_map(|(name, value)| Some((name, value?))));
            Ok(None)
        }
        "RUN" if rest.starts_with("--") => Err(format!(
            "RUN has an option ({}), which is not supported",
            rest.split_whitespace().next().unwrap_or_default()
        )),
        "RUN" => {
            let command = words::list(rest).map_or_else(|| rest.to_owned(), |l| words::script(&l));
            step("RUN", vec![command])
        }
        "COPY" | "ADD" => copy(name, rest).map(Some),
        "ENV" | "ARG" => {
            let given = words::pairs(rest)?.into_iter();
            let pairs = given.filter_map(|(name, value)| Some([name, value?]));
            let args: Vec<_> = pairs.flatten().collect();
            if args.is_empty() {
                // An argument without a default has no value here: there are no build arguments.
                return Ok(None);
            }
            step("ENV", args)
        }
        "WORKDIR" => step("WORKDIR", one_word("WORKDIR", rest)?),
        "USER" => step("USER", one_word("USER", rest)?),
        "ENTRYPOINT" => Ok(Some(Instruction::Entrypoint(words::command(rest)))),
        "CMD" => Ok(Some(Instruction::Cmd(words::command(rest)))),
        "EXPOSE" | "LABEL" | "MAINTAINER" | "VOLUME" | "HEALTHCHECK" | "STOPSIGNAL" => Ok(None),
        other => Err(format!("{other} is not supported")),
    }
}

fn one_word(name: &str, rest: &str) -> Result<Vec<String>, String> {
    let words = words::split(rest)?;
    match words.as_slice() {
        [_] => Ok(words),
        _ => Err(format!("{name} takes one argument")),
    }
}

/// `FROM [--platform=P] IMAGE [AS NAME]`
fn from(rest: &str, arguments: &BTreeMap<String, String>) -> Result<Instruction, String> {
    let mut words = rest
        .split_whitespace()
        .filter(|word| !word.starts_with("--"));
    let image = words.next().ok_or("FROM needs an image")?;
    let mut image = image.to_owned();
    for (name, value) in arguments {
        image = image.replace(&format!("${{{name}}}"), value);
        image = image.replace(&format!("${name}"), value);
    }
    if image.contains('$') {
        return Err(format!("the image {image} has a variable without a value"));
    }
    Ok(Instruction::From(image))
}

fn copy(name: &str, rest: &str) -> Result<Instruction, String> {
    let (mut rest, mut owner, mut mode) = (rest, String::new(), String::new());
    while let Some(option) = rest.strip_prefix("--") {
        let (option, after) = option
            .split_once(char::is_whitespace)
            .unwrap_or((option, ""));
        match option.split_once('=') {
            Some(("chown", value)) => value.clone_into(&mut owner),
            Some(("chmod", value)) => value.clone_into(&mut mode),
            None if option == "link" => {}
            _ => return Err(format!("{name} --{option} is not supported")),
        }
        rest = after.trim_start();
    }
    let mut words = match words::list(rest) {
        Some(words) => words,
        None => words::split(rest)?,
    };
    let to = words.pop().filter(|_| !words.is_empty());
    let to = to.ok_or_else(|| format!("{name} needs a source and a destination"))?;
    if let Some(other) = words
        .iter()
        .find(|word| word.contains("://") || word.starts_with("<<"))
    {
        return Err(format!(
            "{name} of {other} is not supported: get it with RUN"
        ));
    }
    Ok(Instruction::Copy {
        from: words,
        to,
        owner,
        mode,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heredocs_of_run_are_one_command() {
        let text = "FROM a\nRUN <<EOF\nset -e\n# kept\necho \\\nx\nEOF\nUSER u";
        let found = parse(text).unwrap();
        let step = |name, arg: &str| Instruction::Step(name, vec![arg.to_owned()]);
        assert_eq!(found[1], (2, step("RUN", "set -e\n# kept\necho \\\nx")));
        assert_eq!(found[2], (8, step("USER", "u")));
    }

    #[test]
    fn no_text_makes_the_parser_panic() {
        for text in [
            "\\", "FROM", "FROM \\", "RUN <<", "COPY --", "ENV", "ENV =", "ARG", "FROM $",
        ] {
            let _any = parse(text);
        }
    }
}
