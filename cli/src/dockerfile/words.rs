//! Words of instructions: quotes, lists in JSON, pairs.

/// A command of ENTRYPOINT or CMD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Words {
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

pub(super) fn command(text: &str) -> Words {
    list(text).map_or_else(|| Words::Shell(text.to_owned()), Words::List)
}

/// A list as a script for a shell.
pub(crate) fn script(words: &[String]) -> String {
    let quoted = words
        .iter()
        .map(|word| format!("'{}'", word.replace('\'', r"'\''")));
    quoted.collect::<Vec<_>>().join(" ")
}

/// What a container would run. With an ENTRYPOINT in shell form, CMD counts for nothing, as with Docker.
pub(super) fn start(entrypoint: Option<Words>, cmd: Option<Words>) -> Option<String> {
    let text = |words| match words {
        Words::Shell(text) => text,
        Words::List(words) => script(&words),
    };
    let start = match (entrypoint, cmd) {
        (Some(Words::List(entrypoint)), Some(Words::List(cmd))) => {
            script(&[entrypoint, cmd].concat())
        }
        (Some(Words::List(entrypoint)), Some(Words::Shell(cmd))) => {
            let shell = ["/bin/sh".to_owned(), "-c".to_owned(), cmd];
            script(&[entrypoint, shell.to_vec()].concat())
        }
        (Some(entrypoint), _) => text(entrypoint),
        (None, Some(cmd)) => text(cmd),
        (None, None) => return None,
    };
    Some(start).filter(|start| !start.is_empty())
}

/// Splits at blanks outside of quotes, and removes the quotes. A backslash keeps the next character.
pub(super) fn split(text: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, quote) {
            ('\\', None | Some('"')) => {
                let next = chars.next().ok_or("a backslash at the end")?;
                let word = word.get_or_insert_default();
                // Within quotes, only these lose their backslash.
                if quote.is_some() && !"\"\\$".contains(next) {
                    word.push('\\');
                }
                word.push(next);
            }
            (c, Some(open)) if c == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed".to_owned());
    }
    words.extend(word);
    Ok(words)
}

/// The names and values of ENV and ARG: `A=b C="d e"`, or the older `A b c`.
pub(super) fn pairs(text: &str) -> Result<Vec<(String, Option<String>)>, String> {
    let words = split(text)?;
    match words.first() {
        None => Err("a name is missing".to_owned()),
        Some(first) if !first.contains('=') && words.len() > 1 => {
            let (name, value) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
            Ok(vec![(name.to_owned(), Some(value.trim().to_owned()))])
        }
        Some(_) => Ok(words
            .into_iter()
            .map(|word| match word.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (word, None),
            })
            .collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_as_by_docker() {
        let split = |text| split(text).unwrap();
        assert_eq!(
            split(r#"a "b c" 'd "e' f\ g """#),
            ["a", "b c", "d \"e", "f g", ""]
        );
        assert_eq!(split(r#""\n" "\"" '\n'"#), [r"\n", "\"", r"\n"]);
        assert!(super::split("\"a").is_err() && super::split("a\\").is_err());
    }

    #[test]
    fn pairs_have_two_forms() {
        let pair = |a: &str, b: &str| (a.to_owned(), Some(b.to_owned()));
        assert_eq!(
            pairs(r#"A=1 B="x y""#).unwrap(),
            [pair("A", "1"), pair("B", "x y")]
        );
        assert_eq!(pairs("A  b c").unwrap(), [pair("A", "b c")]);
        assert_eq!(pairs("A").unwrap(), [("A".to_owned(), None)]);
    }

    #[test]
    fn entrypoint_and_cmd_are_joined_as_by_docker() {
        let list = |words: &[&str]| Words::List(words.iter().map(ToString::to_string).collect());
        let shell = |text: &str| Words::Shell(text.to_owned());
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
