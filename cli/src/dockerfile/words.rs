//! Words of instructions: quotes, escapes, variables, lists in JSON, as BuildKit reads them.

use std::{iter::Peekable, str::Chars};

use super::variables::Variables;

/// Expands to `$` on the server, which expands variables but has no escape: `$0` is set in its shell.
const DOLLAR: &str = "${0:+$}";

/// A command of ENTRYPOINT or CMD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// The exec form.
    List(Vec<String>),
    /// The shell form.
    Shell(String),
}

/// The exec form, if it is one.
pub(super) fn list(text: &str) -> Option<Vec<String>> {
    text.starts_with('[')
        .then(|| serde_json::from_str(text).ok())
        .flatten()
}

pub(super) fn command(text: &str) -> Command {
    list(text).map_or_else(|| Command::Shell(text.to_owned()), Command::List)
}

/// A list as a shell script.
pub(crate) fn script(words: &[String]) -> String {
    let quoted = words
        .iter()
        .map(|word| format!("'{}'", word.replace('\'', r"'\''")));
    quoted.collect::<Vec<_>>().join(" ")
}

/// A text in double quotes for a shell, in which only variables are expanded. The server uses the same form.
pub(super) fn in_quotes(text: &str) -> String {
    let text = text.replace('\\', r"\\").replace('"', "\\\"");
    let text = text.replace('`', "\\`").replace("$(", "\\$(");
    format!("\"{text}\"")
}

/// The command that a container would run. With an ENTRYPOINT in shell form, CMD is ignored, as in Docker.
pub(super) fn start(entrypoint: Option<Command>, cmd: Option<Command>) -> Option<String> {
    let text = |words| match words {
        Command::Shell(text) => text,
        Command::List(words) => script(&words),
    };
    let start = match (entrypoint, cmd) {
        (Some(Command::List(entrypoint)), Some(Command::List(cmd))) => {
            script(&[entrypoint, cmd].concat())
        }
        (Some(Command::List(entrypoint)), Some(Command::Shell(cmd))) => {
            let shell = ["/bin/sh".to_owned(), "-c".to_owned(), cmd];
            script(&[entrypoint, shell.to_vec()].concat())
        }
        (Some(entrypoint), _) => text(entrypoint),
        (None, Some(cmd)) => text(cmd),
        (None, None) => return None,
    };
    Some(start).filter(|start| !start.is_empty())
}

/// A word without its quotes and escapes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Word(Vec<Piece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Variable {
        name: String,
        /// One of `-`, `:-`, `+`, `:+`, and the word after it.
        other: Option<(String, Word)>,
    },
}

impl Word {
    pub(super) fn literal(text: &str) -> Self {
        Self(vec![Piece::Text(text.to_owned())])
    }

    pub(super) fn variable(name: &str) -> Self {
        let name = name.to_owned();
        Self(vec![Piece::Variable { name, other: None }])
    }

    fn push(&mut self, c: char) {
        match self.0.last_mut() {
            Some(Piece::Text(text)) => text.push(c),
            _ => self.0.push(Piece::Text(c.to_string())),
        }
    }

    /// The name and the value of `NAME=VALUE`, or a name alone.
    pub(super) fn pair(mut self) -> Result<(String, Option<Self>), String> {
        let is_whole = self.0.len() == 1;
        let Some(Piece::Text(text)) = self.0.first_mut() else {
            return Err("a name is missing".to_owned());
        };
        match text.split_once('=') {
            Some((name, rest)) => {
                let name = name.to_owned();
                *text = rest.to_owned();
                Ok((name, Some(self)))
            }
            None if is_whole => Ok((text.clone(), None)),
            None => Err("a name has a variable, which is not supported".to_owned()),
        }
    }

    /// The text for the server, which expands variables of the image and of earlier steps.
    pub(super) fn for_server(&self, variables: &Variables) -> String {
        let pieces = self.0.iter().map(|piece| match piece {
            Piece::Text(text) => text.replace('$', DOLLAR),
            Piece::Variable { name, other } => {
                let argument = variables.argument(name);
                let other = (other.as_ref()).map(|(op, w)| (op.as_str(), w.for_server(variables)));
                match (argument, other) {
                    (None, None) => format!("${{{name}}}"),
                    (None, Some((op, word))) => format!("${{{name}{op}{word}}}"),
                    (Some(_), Some(("+", word))) => word,
                    (Some(value), Some((":+", word))) if !value.is_empty() => word,
                    (Some(_), Some((":+", word))) => format!("${{{name}:+{word}}}"),
                    (Some(""), Some((":-", word))) => format!("${{{name}:-{word}}}"),
                    // A brace would end the expansion. Without it, a variable of the image is ignored.
                    (Some(value), _) if value.replace(DOLLAR, "").contains('}') => value.to_owned(),
                    (Some(value), Some((":-", _))) => format!("${{{name}:-{value}}}"),
                    (Some(value), _) => format!("${{{name}-{value}}}"),
                }
            }
        });
        pieces.collect()
    }

    /// The text, if all its variables have values in the file.
    pub(super) fn plain(&self, variables: &Variables) -> Result<String, String> {
        let pieces = self.0.iter().map(|piece| match piece {
            Piece::Text(text) => Ok(text.clone()),
            Piece::Variable { name, other } => {
                let value = variables.value(name);
                match (value, other) {
                    (Some(value), None) => Ok(value.to_owned()),
                    (Some(value), Some((op, _)))
                        if op == "-" || (op == ":-" && !value.is_empty()) =>
                    {
                        Ok(value.to_owned())
                    }
                    (Some(""), Some((op, _))) if op == ":+" => Ok(String::new()),
                    (None, Some((op, _))) if op.ends_with('+') => Ok(String::new()),
                    (_, Some((_, word))) => word.plain(variables),
                    (None, None) => Err(format!(
                        "${name} has no value here: set it before with ARG or ENV"
                    )),
                }
            }
        });
        pieces.collect()
    }
}

/// The words of a text, separated by blanks outside quotes.
pub(super) fn split(text: &str) -> Result<Vec<Word>, String> {
    let mut lexer = Lexer(text.chars().peekable());
    let mut words = Vec::new();
    loop {
        while lexer.0.next_if(|c| c.is_whitespace()).is_some() {}
        if lexer.0.peek().is_none() {
            return Ok(words);
        }
        words.push(lexer.word(Stop::Blank)?);
    }
}

/// A text as one word, including its blanks.
pub(super) fn whole(text: &str) -> Result<Word, String> {
    Lexer(text.chars().peekable()).word(Stop::Never)
}

/// End of a word within the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    Blank,
    Brace,
    Never,
}

struct Lexer<'a>(Peekable<Chars<'a>>);

impl Lexer<'_> {
    fn word(&mut self, stop: Stop) -> Result<Word, String> {
        let mut word = Word::default();
        loop {
            match self.0.peek() {
                None => break,
                Some(c) if stop == Stop::Blank && c.is_whitespace() => break,
                Some('}') if stop == Stop::Brace => break,
                Some('$') => self.variable(&mut word)?,
                Some(_) => match self.0.next().unwrap_or_default() {
                    '\'' => loop {
                        match self.quoted()? {
                            '\'' => break,
                            c => word.push(c),
                        }
                    },
                    '"' => self.double_quoted(&mut word)?,
                    '\\' => word.push(self.0.next().ok_or("a backslash at the end")?),
                    c => word.push(c),
                },
            }
        }
        let has_brace = |piece: &Piece| matches!(piece, Piece::Text(text) if text.contains('}'));
        if stop == Stop::Brace && word.0.iter().any(has_brace) {
            return Err("a } within ${…} is not supported".to_owned());
        }
        Ok(word)
    }

    fn quoted(&mut self) -> Result<char, String> {
        self.0
            .next()
            .ok_or_else(|| "a quote is not closed".to_owned())
    }

    fn double_quoted(&mut self, word: &mut Word) -> Result<(), String> {
        loop {
            if self.0.peek() == Some(&'$') {
                self.variable(word)?;
                continue;
            }
            match self.quoted()? {
                '"' => return Ok(()),
                // Only these characters lose their backslash.
                '\\' => word.push(self.0.next_if(|c| "\"\\$".contains(*c)).unwrap_or('\\')),
                c => word.push(c),
            }
        }
    }

    fn variable(&mut self, word: &mut Word) -> Result<(), String> {
        self.0.next();
        let is_braced = self.0.next_if_eq(&'{').is_some();
        let mut name = String::new();
        while let Some(c) = self.0.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
            name.push(c);
        }
        let has_name = name.starts_with(|c: char| !c.is_ascii_digit());
        match self.0.peek() {
            Some(c) if !has_name && (is_braced || !name.is_empty() || "@*#?-$!".contains(*c)) => {
                return Err("a $ without a name: write \\$ for the character".to_owned());
            }
            _ if !has_name && !is_braced && name.is_empty() => {
                word.push('$');
                return Ok(());
            }
            _ if !has_name => return Err("a $ without a name".to_owned()),
            _ => {}
        }
        let other = if is_braced {
            self.operator(&name)?
        } else {
            None
        };
        word.0.push(Piece::Variable { name, other });
        Ok(())
    }

    /// The part after the name in `${NAME…}`.
    fn operator(&mut self, name: &str) -> Result<Option<(String, Word)>, String> {
        if self.0.next_if_eq(&'}').is_some() {
            return Ok(None);
        }
        let colon = self.0.next_if_eq(&':').map_or("", |_| ":");
        let Some(sign) = self.0.next_if(|c| "-+".contains(*c)) else {
            return Err(format!(
                "${{{name}…}} is not supported with other operators than - and +: set another variable with RUN"
            ));
        };
        let word = self.word(Stop::Brace)?;
        match self.0.next() {
            Some('}') => Ok(Some((format!("{colon}{sign}"), word))),
            _ => Err(format!("${{{name} is not closed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> Vec<String> {
        let words = split(text).unwrap().into_iter();
        words
            .map(|word| word.plain(&Variables::default()).unwrap())
            .collect()
    }

    #[test]
    fn words_are_split_as_by_docker() {
        assert_eq!(
            plain(r#"a "b c" 'd "e' f\ g """#),
            ["a", "b c", "d \"e", "f g", ""]
        );
        assert_eq!(
            plain(r#""\n" "\"" '\n' '$A' \$A "\$A" a$"#),
            [r"\n", "\"", r"\n", "$A", "$A", "$A", "a$"]
        );
        for wrong in [
            "\"a",
            "a\\",
            "$1",
            "$$",
            "${",
            "${}",
            "${A",
            "${A:-b",
            "${A#b}",
            "${A:-'}'}",
        ] {
            assert!(split(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn pairs_have_names_without_variables() {
        let pair = |text: &str| whole(text)?.pair();
        let (name, value) = pair("A=b=$C").unwrap();
        assert_eq!(
            (
                name.as_str(),
                value.unwrap().for_server(&Variables::default()).as_str()
            ),
            ("A", "b=${C}")
        );
        assert_eq!(pair("A").unwrap(), ("A".to_owned(), None));
        assert!(pair("$A=b").is_err() && pair("A$B").is_err());
    }

    /// The shell's expansion of the text in the form in which the server passes it to a shell.
    fn expanded(text: &str, envs: &[(&str, &str)]) -> String {
        let output = std::process::Command::new("bash")
            .args(["-c", &format!("printf %s {}", in_quotes(text)), "bash"])
            .env_clear()
            .envs(envs.iter().copied())
            .output()
            .unwrap();
        assert!(output.status.success(), "{text}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn the_server_expands_variables_and_keeps_escaped_ones() {
        let mut variables = Variables::default();
        for (name, value) in [
            ("A", "x"),
            ("EMPTY", ""),
            ("MONEY", "'$5'"),
            ("BRACE", "'}'"),
            ("PATH", "no"),
        ] {
            variables.add_argument(name, Some(&whole(value).unwrap()));
        }
        for (text, result) in [
            ("$A/$AB/${A}B", "x//xB"),
            ("'$A' \\$A \"\\$A\" \"$A\"", "$A $A $A x"),
            ("/opt:$PATH:${PATH:-y}", "/opt:/bin:/bin"),
            (
                "${NONE:-a $A} ${NONE-'$A'} ${A:+set} ${NONE:+set} ${EMPTY:-e} ${EMPTY-e}. ${EMPTY:+e}.",
                "a x $A set  e . .",
            ),
            ("${A:-y}${A-y}$MONEY$BRACE", "xx$5}"),
            (
                r#"$(echo no) `echo no` \"q\" a\\b"#,
                r#"$(echo no) `echo no` "q" a\b"#,
            ),
        ] {
            let text = whole(text).unwrap().for_server(&variables);
            assert_eq!(expanded(&text, &[("PATH", "/bin")]), result, "{text}");
        }
    }

    #[test]
    fn entrypoint_and_cmd_are_joined_as_by_docker() {
        let list = |words: &[&str]| Command::List(words.iter().map(ToString::to_string).collect());
        let shell = |text: &str| Command::Shell(text.to_owned());
        let started = |e, c| start(e, c).unwrap_or_default();
        assert_eq!(started(Some(list(&["a"])), Some(list(&["b"]))), "'a' 'b'");
        assert_eq!(started(Some(shell("a")), Some(list(&["b"]))), "a");
        assert_eq!(
            started(Some(list(&["a"])), Some(shell("b"))),
            "'a' '/bin/sh' '-c' 'b'"
        );
        assert_eq!(started(None, Some(shell("b $X"))), "b $X");
        assert_eq!(started(None, None), "");
    }
}
