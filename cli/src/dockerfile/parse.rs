//! Parses the text of a Dockerfile into its instructions.

use super::{
    variables::{BuildArgs, Variables},
    words::{self, Command, Word},
};

/// An instruction that affects a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Instruction {
    From(String),
    /// A step that the server supports, and its arguments.
    Step(&'static str, Vec<String>),
    Copy {
        from: Vec<String>,
        to: String,
        /// Empty: the user of the step.
        owner: String,
        /// Empty: the mode of the file.
        mode: String,
    },
    Entrypoint(Command),
    Cmd(Command),
}

/// A line number, and the error there.
type Wrong = (usize, String);

/// File name endings of archives, which ADD would unpack.
const ARCHIVES: [&str; 8] = [
    ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst",
];

/// The parsed content of a Dockerfile.
#[derive(Debug)]
pub(super) struct Parsed {
    /// Instructions with the numbers of their first lines.
    pub(super) instructions: Vec<(usize, Instruction)>,
    /// Names of given arguments without an ARG.
    pub(super) unused: Vec<String>,
}

pub(super) fn parse(text: &str, args: &BuildArgs) -> Result<Parsed, Wrong> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let (mut found, mut variables) = (Vec::new(), Variables::new(args));
    let mut lines = text.lines().zip(1_usize..);
    while let Some((line, number)) = lines.next() {
        if is_comment(line) || line.trim().is_empty() {
            check_comment(line).map_err(|why| (number, why))?;
            continue;
        }
        let (whole, mut goes_on) = continued(line.trim_start());
        let mut whole = whole.to_owned();
        while goes_on {
            // Comments and empty lines between the lines of an instruction are skipped.
            let next = lines.find(|(next, _)| !is_comment(next) && !next.trim().is_empty());
            let (part, more) = next.map_or(("", false), |(next, _)| continued(next));
            whole.push_str(part);
            goes_on = more;
        }
        let (name, rest) = whole
            .split_once(char::is_whitespace)
            .unwrap_or((&whole, ""));
        let (name, rest) = (name.to_ascii_uppercase(), rest.trim());
        let heredoc = Heredoc::of(rest).filter(|_| name == "RUN");
        let rest = match heredoc {
            None => Ok(rest.to_owned()),
            Some(heredoc) => heredoc.command(rest, lines.by_ref().map(|(line, _)| line)),
        };
        let is_first = found.is_empty();
        let parsed = rest.and_then(|rest| instruction(&name, &rest, is_first, &mut variables));
        found.extend(
            parsed
                .map_err(|why| (number, why))?
                .map(|one| (number, one)),
        );
    }
    Ok(Parsed {
        instructions: found,
        unused: variables.unused(),
    })
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with('#')
}

/// Comments have no effect, with one exception.
fn check_comment(line: &str) -> Result<(), String> {
    let text: String = line.chars().filter(|c| !c.is_whitespace()).collect();
    match text.to_ascii_lowercase().strip_prefix("#escape=") {
        None | Some("\\") => Ok(()),
        Some(_) => Err("another escape character is not supported: use \\".to_owned()),
    }
}

/// A line without the backslash at its end, and whether there was one.
fn continued(line: &str) -> (&str, bool) {
    match line.trim_end_matches([' ', '\t']).strip_suffix('\\') {
        Some(rest) if !rest.ends_with('\\') => (rest, true),
        _ => (line, false),
    }
}

/// `<<EOF` in a command of RUN.
struct Heredoc {
    end: String,
    /// `<<-`: leading tabs of lines are stripped.
    strips_tabs: bool,
    /// Whether the command consists only of the lines.
    is_alone: bool,
}

impl Heredoc {
    fn of(command: &str) -> Option<Self> {
        let mark = command.match_indices("<<").find(|(at, _)| {
            let before = command[..*at].trim_end_matches(|c: char| c.is_ascii_digit());
            before.is_empty() || before.ends_with(char::is_whitespace)
        });
        let rest = &command[mark?.0 + 2..];
        let (strips_tabs, rest) = match rest.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, rest),
        };
        let rest = rest.trim_start_matches(['"', '\'']);
        let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (end, after) = rest.split_at(length.unwrap_or(rest.len()));
        Some(Self {
            end: Some(end).filter(|end| !end.is_empty())?.to_owned(),
            strips_tabs,
            is_alone: command.starts_with("<<") && after.trim_matches(['"', '\'']).is_empty(),
        })
    }

    /// The command with its lines, up to the end marker.
    fn command<'a>(
        &self,
        first: &str,
        mut lines: impl Iterator<Item = &'a str>,
    ) -> Result<String, String> {
        let mut body = String::new();
        loop {
            let line = lines.next();
            let line = line.ok_or_else(|| format!("no line {} ends the lines of RUN", self.end))?;
            let stripped = if self.strips_tabs {
                line.trim_start_matches('\t')
            } else {
                line
            };
            if stripped == self.end {
                break;
            }
            body.push_str(if self.is_alone { stripped } else { line });
            body.push('\n');
        }
        if self.is_alone && body.starts_with("#!") {
            let why =
                "a program in the lines of RUN is not supported: COPY it as a file, then RUN it";
            return Err(why.to_owned());
        }
        Ok(if self.is_alone {
            body
        } else {
            format!("{first}\n{body}{}", self.end)
        })
    }
}

/// `None`: the instruction does not affect the build.
fn instruction(
    name: &str,
    rest: &str,
    is_first: bool,
    variables: &mut Variables,
) -> Result<Option<Instruction>, String> {
    let step = |name, args| Ok(Some(Instruction::Step(name, args)));
    let one = |variables: &Variables| match words::whole(rest)?.for_server(variables) {
        none if none.is_empty() => Err(format!("{name} takes one argument")),
        word => Ok(vec![word]),
    };
    match name {
        "FROM" => from(rest, variables).map(Some),
        "ARG" => {
            for word in words::split(rest)? {
                let (name, value) = word.pair()?;
                if is_first {
                    variables.add_global(&name, value.as_ref())?;
                } else {
                    variables.add_argument(&name, value.as_ref());
                }
            }
            Ok(None)
        }
        "RUN" if rest.starts_with("--") => Err(format!(
            "RUN has an option ({}), which is not supported: leave it out",
            rest.split_whitespace().next().unwrap_or_default()
        )),
        "RUN" => {
            let command = words::list(rest).map_or_else(|| rest.to_owned(), |l| words::script(&l));
            step("RUN", vec![variables.command(command)])
        }
        "COPY" | "ADD" => copy(name, rest, variables).map(Some),
        "ENV" => {
            let pairs = pairs(rest)?;
            // All values come from before this line.
            let args = pairs
                .iter()
                .flat_map(|(name, value)| [name.clone(), value.for_server(variables)]);
            let args = args.collect();
            let before = variables.clone();
            for (name, value) in &pairs {
                variables.add_env(name, value.plain(&before).ok());
            }
            step("ENV", args)
        }
        "WORKDIR" => step("WORKDIR", one(variables)?),
        "USER" => step("USER", one(variables)?),
        "ENTRYPOINT" => Ok(Some(Instruction::Entrypoint(words::command(rest)))),
        "CMD" => Ok(Some(Instruction::Cmd(words::command(rest)))),
        "EXPOSE" | "LABEL" | "MAINTAINER" | "VOLUME" | "HEALTHCHECK" | "STOPSIGNAL" => Ok(None),
        "SHELL" => {
            let why = "commands run in bash: leave it out, and write what it sets into RUN (`set -o pipefail`)";
            Err(format!("SHELL is not supported: {why}"))
        }
        other => Err(format!("{other} is not supported: leave it out")),
    }
}

/// The names and values of ENV: `A=b C="d e"`, or the older `A b c`.
fn pairs(rest: &str) -> Result<Vec<(String, Word)>, String> {
    let (first, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    if !first.contains('=') && !after.is_empty() {
        return Ok(vec![(first.to_owned(), words::whole(after.trim())?)]);
    }
    let pairs = words::split(rest)?.into_iter().map(|word| {
        let (name, value) = word.pair()?;
        let value = value.ok_or_else(|| format!("ENV {name} has no value"))?;
        Ok((name, value))
    });
    let pairs: Vec<_> = pairs.collect::<Result<_, String>>()?;
    Some(pairs)
        .filter(|pairs| !pairs.is_empty())
        .ok_or_else(|| "a name is missing".to_owned())
}

/// `FROM [--platform=P] IMAGE [AS NAME]`
fn from(rest: &str, variables: &Variables) -> Result<Instruction, String> {
    let variables = variables.of_from();
    let words = words::split(rest)?
        .into_iter()
        .map(|word| word.plain(&variables));
    let mut words = words.collect::<Result<Vec<_>, _>>()?;
    if let Some(platform) = words
        .first()
        .and_then(|word| word.strip_prefix("--platform="))
    {
        if platform != "linux/amd64" {
            let why = "sandboxes run linux/amd64 only: leave the option out";
            return Err(format!("the platform {platform} is not supported: {why}"));
        }
        words.remove(0);
    }
    match words.as_slice() {
        [image] => Ok(Instruction::From(image.clone())),
        [image, r#as, _] if r#as.eq_ignore_ascii_case("as") => Ok(Instruction::From(image.clone())),
        _ => Err("FROM needs an image, and takes AS NAME".to_owned()),
    }
}

fn copy(name: &str, rest: &str, variables: &Variables) -> Result<Instruction, String> {
    let for_server = |text: &str| Ok::<_, String>(words::whole(text)?.for_server(variables));
    let (mut rest, mut owner, mut mode) = (rest, String::new(), String::new());
    while let Some(option) = rest.strip_prefix("--") {
        let (option, after) = option
            .split_once(char::is_whitespace)
            .unwrap_or((option, ""));
        match option.split_once('=') {
            Some(("chown", value)) => owner = for_server(value)?,
            Some(("chmod", value)) => mode = for_server(value)?,
            None if option == "link" => {}
            Some(("from", _)) => {
                let cure = "build what it names before, and COPY the files of this host";
                return Err(format!("{name} --{option} is not supported: {cure}"));
            }
            _ => return Err(format!("{name} --{option} is not supported: leave it out")),
        }
        rest = after.trim_start();
    }
    let mut words = match words::list(rest) {
        Some(words) => words
            .iter()
            .map(|word| words::whole(word))
            .collect::<Result<_, _>>()?,
        None => words::split(rest)?,
    };
    let to = words.pop().filter(|_| !words.is_empty());
    let to = to.ok_or_else(|| format!("{name} needs a source and a destination"))?;
    let from = words.iter().map(|word| word.plain(variables));
    let from = from.collect::<Result<Vec<_>, _>>()?;
    for source in &from {
        if source.contains("://") || source.starts_with("<<") || source.starts_with("git@") {
            return Err(format!(
                "{name} of {source} is not supported: get it with RUN"
            ));
        }
        if name == "ADD" && ARCHIVES.iter().any(|end| source.ends_with(end)) {
            return Err(format!(
                "ADD does not unpack {source}: COPY it, then RUN tar"
            ));
        }
    }
    Ok(Instruction::Copy {
        from,
        to: to.for_server(variables),
        owner,
        mode,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_plain(text: &str) -> Result<Vec<(usize, Instruction)>, Wrong> {
        parse(text, &BuildArgs::new()).map(|parsed| parsed.instructions)
    }

    fn given(pairs: &[(&str, &str)]) -> BuildArgs {
        let pairs = pairs.iter().map(|(name, value)| (*name, *value));
        pairs.map(|(n, v)| (n.to_owned(), v.to_owned())).collect()
    }

    fn steps(text: &str) -> Vec<String> {
        steps_with(&format!("FROM a\n{text}"), &[])
    }

    fn steps_with(text: &str, args: &[(&str, &str)]) -> Vec<String> {
        let found = parse(text, &given(args)).unwrap().instructions.into_iter();
        let steps = found.filter_map(|(_, one)| match one {
            Instruction::Step(name, args) => Some(format!("{name} {}", args.join("|"))),
            Instruction::Copy { from, to, .. } => Some(format!("COPY {}|{to}", from.join("|"))),
            _ => None,
        });
        steps.collect()
    }

    #[test]
    fn lines_are_continued_without_a_blank() {
        let text = "RUN echo a\\\nb \\  \n# comment\n\n  c \\\\\nUSER u\\\n";
        assert_eq!(steps(text), ["RUN echo ab   c \\\\", "USER u"]);
    }

    #[test]
    fn arguments_are_variables_of_the_build_only() {
        let text =
            "ARG A=1 B\nRUN x\nENV C=$A$AB\nARG C=no\nRUN y\nENV A=2\nCOPY $A /$A\nRUN [\"z\"]";
        assert_eq!(
            steps(text),
            [
                "RUN export A=\"${A-1}\"\nx",
                "ENV C|${A-1}${AB}",
                "RUN export A=\"${A-1}\"\ny",
                "ENV A|2",
                "COPY 2|/${A}",
                "RUN 'z'",
            ]
        );
    }

    #[test]
    fn given_arguments_replace_defaults_where_an_arg_declares_them() {
        let text = "ARG V=1\nARG REST\nFROM x:$V\nRUN before\nARG V\nARG A=$V B=${A}c REST\nRUN x\n\
                    ENV E=$A A=env\nRUN y";
        let of = |args: &[(&str, &str)]| {
            let image = parse(text, &given(args)).unwrap().instructions.remove(0).1;
            (image, steps_with(text, args))
        };
        let (image, steps) = of(&[]);
        assert_eq!(image, Instruction::From("x:1".to_owned()));
        assert_eq!(steps[0], "RUN before");
        assert_eq!(
            steps[1],
            "RUN export A=\"${V-1}\" B=\"${V-1}c\" V=\"${V-1}\"\nx"
        );
        // Before FROM, after it without a value, and in later defaults. Given values are not expanded.
        let (image, steps) = of(&[("V", "2"), ("A", "$V"), ("REST", "")]);
        assert_eq!(image, Instruction::From("x:2".to_owned()));
        assert_eq!(
            steps[1..],
            [
                "RUN export A=\"${A-${0:+$}V}\" B=\"${A-${0:+$}V}c\" REST=\"${REST-}\" V=\"${V-2}\"\nx",
                "ENV E|${A-${0:+$}V}|A|env",
                // ENV precedes the argument.
                "RUN export B=\"${A-${0:+$}V}c\" REST=\"${REST-}\" V=\"${V-2}\"\ny",
            ]
        );
        // An ARG before FROM is not a variable for commands.
        let global = steps_with("ARG A=1\nFROM x\nRUN $A", &[("A", "2")]);
        assert_eq!(global, ["RUN $A"]);
    }

    #[test]
    fn arguments_that_no_arg_takes_are_found() {
        let unused = |args: &[(&str, &str)]| {
            let text = "ARG A\nFROM a\nARG B=1\nENV C=1\nRUN x";
            parse(text, &given(args)).unwrap().unused
        };
        assert_eq!(unused(&[("A", "1"), ("B", "")]), [""; 0]);
        assert_eq!(
            unused(&[("C", "1"), ("NONE", "1"), ("A", "1")]),
            ["C", "NONE"]
        );
        // Predefined for commands only.
        let proxy = [("https_proxy", "http://p:3128/$"), ("TARGETARCH", "amd64")];
        assert_eq!(unused(&proxy), [""; 0]);
        assert_eq!(
            steps_with("FROM a\nRUN x\nENV https_proxy=own\nRUN y", &proxy),
            [
                "RUN export https_proxy=\"http://p:3128/${0:+$}\"\nx",
                "ENV https_proxy|own",
                "RUN y",
            ]
        );
    }

    #[test]
    fn heredocs_of_run_are_one_command() {
        let text =
            "RUN <<EOF\nset -e\n# kept\necho \\\nx\nEOF\nRUN cat <<-'E' > /f\n\ta\n\tE\nUSER u";
        assert_eq!(
            steps(text),
            [
                "RUN set -e\n# kept\necho \\\nx\n",
                "RUN cat <<-'E' > /f\n\ta\nE",
                "USER u",
            ]
        );
        for wrong in ["RUN <<EOF\nx", "RUN <<EOF\n#!/bin/python\nEOF"] {
            assert_eq!(parse_plain(wrong).unwrap_err().0, 1, "{wrong}");
        }
        assert_eq!(steps("RUN echo $((1<<EOF))"), ["RUN echo $((1<<EOF))"]);
    }

    #[test]
    fn the_image_has_the_variables_before_it() {
        let image = |text: &str| match parse_plain(text).map(|found| found[0].1.clone()) {
            Ok(Instruction::From(image)) => Ok(image),
            other => Err(format!("{other:?}")),
        };
        let arguments = "ARG A=1\nARG AB=$A.2\n";
        for (from, found) in [
            ("FROM x:$AB", "x:1.2"),
            ("FROM --platform=$BUILDPLATFORM x:${A} as y", "x:1"),
            ("FROM ${NONE:-x}", "x"),
            ("FROM x-$TARGETARCH", "x-amd64"),
        ] {
            assert_eq!(image(&format!("{arguments}{from}")).as_deref(), Ok(found));
        }
        for wrong in ["--platform=linux/arm64 x", "x$NONE", "x y", "x as", ""] {
            assert!(image(&format!("FROM {wrong}")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_text_makes_the_parser_panic() {
        for text in [
            "\\",
            "FROM",
            "FROM \\",
            "RUN <<",
            "COPY --",
            "ENV",
            "ENV =",
            "ARG",
            "ARG =",
            "FROM $",
            "RUN é<<é",
            "ENV $",
        ] {
            let _any = parse_plain(text);
        }
    }
}
