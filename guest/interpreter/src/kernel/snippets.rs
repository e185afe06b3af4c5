//! Code in the languages of kernels that sets environment variables or reseeds random state.

use std::collections::BTreeMap;

use serde_json::json;

/// New values of variables; `None` removes a variable.
pub(crate) type Changes = BTreeMap<String, Option<String>>;

/// The language of a kernel. `Other` is any language without such code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    Python,
    R,
    Bash,
    Other,
}

impl Language {
    /// The language that a kernelspec names.
    pub(crate) fn of(language: &str) -> Self {
        match language.to_lowercase().as_str() {
            "python" => Self::Python,
            "r" => Self::R,
            "bash" => Self::Bash,
            _ => Self::Other,
        }
    }

    /// Code that changes variables without other side effects; `None` if the language is not supported.
    pub(crate) fn change(self, changes: &Changes) -> Option<String> {
        let set = changes.iter().filter_map(|(k, v)| Some((k, v.as_ref()?)));
        let unset = changes.iter().filter(|(_, v)| v.is_none()).map(|(k, _)| k);
        // JSON strings are valid string literals of Python and R.
        let quoted = |text: &str| json!(text).to_string();
        match self {
            Self::Python => {
                let set = json!(set.collect::<BTreeMap<_, _>>());
                let unset = json!(unset.collect::<Vec<_>>());
                Some(format!(
                    "(lambda e: (e.update({set}), [e.pop(k, None) for k in {unset}]))(__import__('os').environ);"
                ))
            }
            Self::R => {
                let set: Vec<String> = set
                    .map(|(k, v)| format!("{}={}", quoted(k), quoted(v)))
                    .collect();
                let unset: Vec<String> = unset.map(|k| quoted(k)).collect();
                let mut code = String::new();
                if !set.is_empty() {
                    code.push_str(&format!("Sys.setenv({});", set.join(",")));
                }
                if !unset.is_empty() {
                    code.push_str(&format!("Sys.unsetenv(c({}));", unset.join(",")));
                }
                Some(format!("invisible({{{code}}})"))
            }
            Self::Bash => {
                let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
                let set = set.map(|(k, v)| format!("export {k}={}", quoted(v)));
                let lines: Vec<String> = set.chain(unset.map(|k| format!("unset {k}"))).collect();
                Some(lines.join("\n"))
            }
            Self::Other => None,
        }
    }

    /// Code that reseeds the random state of a kernel that was cloned while it ran.
    pub(crate) fn seed(self) -> Option<&'static str> {
        match self {
            Self::Python => Some(
                "[m.seed() for n in ('random', 'numpy.random') if (m := __import__('sys').modules.get(n))];",
            ),
            // R reseeds itself if `.Random.seed` does not exist.
            Self::R => Some("invisible(suppressWarnings(rm('.Random.seed', envir = globalenv())))"),
            Self::Bash => Some("RANDOM=$SRANDOM"),
            Self::Other => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes() -> Changes {
        let set = |k: &str, v: &str| (k.to_owned(), Some(v.to_owned()));
        Changes::from([set("A", "it's \"$x\"\n"), ("B".to_owned(), None)])
    }

    #[test]
    fn a_shell_accepts_the_changes() {
        let code = Language::of("bash").change(&changes()).unwrap();
        let script = format!("B=1\n{code}\nprintf '%s|%s' \"$A\" \"${{B-none}}\"");
        let output = std::process::Command::new("bash")
            .args(["-c", &script])
            .output()
            .unwrap();
        assert_eq!(output.stdout, b"it's \"$x\"\n|none");
    }

    #[test]
    fn code_quotes_values_in_each_language() {
        assert_eq!(
            Language::of("R").change(&changes()).unwrap(),
            r#"invisible({Sys.setenv("A"="it's \"$x\"\n");Sys.unsetenv(c("B"));})"#
        );
        let python = Language::of("python").change(&changes()).unwrap();
        assert!(python.contains(r#"{"A":"it's \"$x\"\n"}"#) && python.contains(r#"["B"]"#));
        assert!(Language::of("ocaml").change(&changes()).is_none());
    }
}
