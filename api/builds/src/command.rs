//! Commands of a build in the form that the guest's agent accepts.

use std::{collections::BTreeMap, time::Duration};

use envd::ExecRequest;

use super::settings::Settings;
use model::quoted;

const BASH: &str = "/bin/bash";
/// Time limit of a command. Equals E2B's limit for RUN.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(3600);
/// Appended to a `PATH` from the image or an ENV step, because a wrong one must not hide basic programs.
const STANDARD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const ROOT: &str = "root";

/// A bash script to run in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Command {
    pub(super) script: String,
    /// The script's `$1`, `$2`…
    pub(super) args: Vec<String>,
    pub(super) user: String,
    /// `None`: the user's home.
    pub(super) workdir: Option<String>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) shell: Shell,
    /// `None`: it keeps running, in the template and in its sandboxes.
    pub(super) limit: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shell {
    /// With the login profiles of the image and of the user.
    Login,
    /// With the given environment only.
    Plain,
}

impl Command {
    /// A command of the template's author: a RUN step, or the start or ready command.
    pub(super) fn of_author(script: &str, settings: &Settings) -> Self {
        Self {
            script: script.to_owned(),
            args: Vec::new(),
            user: settings.user.clone(),
            workdir: settings.workdir.clone(),
            env: settings.env.clone(),
            shell: Shell::Login,
            limit: Some(COMMAND_LIMIT),
        }
    }

    /// A script of this program. Runs as root in `/`.
    pub(super) fn of_root(script: &str, args: &[&str], settings: &Settings) -> Self {
        Self {
            args: args.iter().map(ToString::to_string).collect(),
            user: ROOT.to_owned(),
            workdir: Some("/".to_owned()),
            shell: Shell::Plain,
            ..Self::of_author(script, settings)
        }
    }

    /// The request to the agent, which kills the command at its limit, if it has one.
    pub(super) fn request(&self) -> ExecRequest {
        let mut env = self.env.clone();
        let mut script = self.script.clone();
        if self.shell == Shell::Login
            && let Some(path) = env.get_mut("PATH")
        {
            // Debian's /etc/profile replaces PATH.
            script = format!("export PATH={}:\"$PATH\"; {script}", quoted(path));
            path.push(':');
            path.push_str(STANDARD_PATH);
        }
        let mut args = match self.shell {
            Shell::Login => vec!["-l"],
            Shell::Plain => Vec::new(),
        };
        args.extend(["-c", &script, BASH]);
        args.extend(self.args.iter().map(String::as_str));
        ExecRequest {
            envs: env,
            cwd: self.workdir.clone(),
            user: Some(self.user.clone()),
            kill_after: self.limit,
            ..ExecRequest::new(BASH, &args)
        }
    }
}

/// Quotes the text as one shell word in which variables are expanded and nothing else is.
pub(super) fn expanded(text: &str) -> String {
    let escaped = text
        .replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('`', "\\`")
        .replace("$(", "\\$(");
    format!("\"{escaped}\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs a request on this host, as the user of the test.
    pub(crate) fn run(request: &ExecRequest) -> (String, bool) {
        let output = std::process::Command::new(&request.cmd)
            .args(&request.args)
            .env_clear()
            .envs(&request.envs)
            .current_dir(request.cwd.as_deref().unwrap_or("/"))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (text, output.status.success())
    }

    fn settings(env: &[(&str, &str)]) -> Settings {
        let env = env.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
        Settings {
            env: env.collect(),
            ..Settings::default()
        }
    }

    #[test]
    fn the_path_of_the_image_comes_first_whatever_the_profile_does() {
        let settings = settings(&[("PATH", "/opt/it's here/bin")]);
        let command = Command::of_author("echo \"$PATH\"", &settings);
        let (path, _) = run(&command.request());
        assert!(path.starts_with("/opt/it's here/bin:"), "{path}");
        assert!(path.contains(":/usr/bin"), "{path}");
    }

    #[test]
    fn scripts_of_the_builder_get_their_arguments_as_they_are() {
        let args = ["a b", "$HOME", "`x`"];
        let command = Command::of_root("printf '%s|' \"$@\"", &args, &settings(&[]));
        assert_eq!(run(&command.request()), ("a b|$HOME|`x`|".to_owned(), true));
    }

    #[test]
    fn only_variables_are_expanded() {
        let settings = settings(&[("A", "x y"), ("PATH", "/usr/bin:/bin")]);
        for (text, shown) in [
            ("$A/b", "x y/b"),
            ("${A}c", "x yc"),
            ("$(echo no)", "$(echo no)"),
            ("`echo no`", "`echo no`"),
            (r#"\n "q" 'q'"#, r#"\n "q" 'q'"#),
            ("$NONE", ""),
        ] {
            let script = format!("printf %s {}", expanded(text));
            let (found, _) = run(&Command::of_root(&script, &[], &settings).request());
            assert_eq!(found, shown, "{text:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_text_without_variables_is_kept(text in "[ -#%-~ä\n]{0,30}") {
            let script = format!("printf %s {} {}; printf '|'", expanded(&text), quoted(&text));
            let (found, _) = run(&Command::of_root(&script, &[], &Settings::default()).request());
            prop_assert_eq!(found, format!("{text}{text}|"));
        }
    }
}
