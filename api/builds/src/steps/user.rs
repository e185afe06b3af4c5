//! USER: `[name, "true"?]`. Creates a missing account. "true" lets it use sudo without a password.

use rest::LogLevel;

use super::{Disk, Done, Place, StepError};
use crate::{
    command::{Command, expanded},
    settings::Settings,
};

/// Longest name of an account (useradd(8)).
const MAX_NAME: usize = 32;

const ADD: &str = include_str!("user_add.sh");
const SUDO: &str = include_str!("user_sudo.sh");

pub(super) async fn perform(args: &[&str], place: &Place<'_>) -> Result<Done, StepError> {
    let (name, is_admin) = match args {
        [] => return Err(StepError::text("USER requires a username argument")),
        [name] => (name, false),
        [name, admin, ..] => (name, *admin == "true"),
    };
    let found = place.ask(&find_script(name), &[]).await;
    let found = found.map_err(StepError::of("failed to create user"))?;
    let (name, mut disk) = read(&found)?;
    if disk == Disk::Changed {
        let add = of_root(ADD, &name, place);
        let made = place.run(&add, LogLevel::Info).await;
        made.map_err(StepError::of("failed to create user"))?;
    }
    if is_admin {
        let sudo = of_root(SUDO, &name, place);
        let made = place.run(&sudo, LogLevel::Debug).await;
        made.map_err(StepError::of("failed to add user to sudo group"))?;
        disk = Disk::Changed;
    }
    Ok(Done {
        settings: Settings {
            user: name,
            ..place.settings.clone()
        },
        disk,
    })
}

fn of_root(script: &str, name: &str, place: &Place<'_>) -> Command {
    Command::of_root(script, &[name], place.settings)
}

/// Prints `found` and the account's name, or `missing` and the name as it was given.
fn find_script(name: &str) -> String {
    format!("name={}\n{}", expanded(name), include_str!("user_find.sh"))
}

/// Whether the account has to be created, and its name. The agent looks up accounts by name.
fn read(answer: &str) -> Result<(String, Disk), StepError> {
    let parts = answer.strip_suffix('\n').and_then(|a| a.split_once(' '));
    let (disk, name) = match parts {
        Some(("found", name)) => (Disk::Unchanged, name),
        Some(("missing", name)) => (Disk::Changed, name),
        _ => return Err(StepError::text("failed to create user: no output")),
    };
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_-.$@+".contains(c);
    let is_valid = !name.starts_with('-') && name.chars().all(is_name);
    if name.is_empty() || name.len() > MAX_NAME || !is_valid {
        let name: String = name.chars().take(MAX_NAME).collect();
        let text = format!("failed to create user: invalid user name {name:?}");
        return Err(StepError::Failed(text));
    }
    Ok((name.to_owned(), disk))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(name: &str) -> String {
        let output = std::process::Command::new("/bin/bash")
            .args(["-c", &find_script(name)])
            .env("WHO", "root")
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn accounts_are_found_by_name_and_number() {
        for (name, answer) in [
            ("root", "found root\n"),
            ("0", "found root\n"),
            ("$WHO", "found root\n"),
            ("root:root", "found root\n"),
            ("no-such-user", "missing no-such-user\n"),
            ("123456", "missing 123456\n"),
            ("a b", "missing a b\n"),
            ("$(id)", "missing $(id)\n"),
        ] {
            assert_eq!(find(name), answer, "{name}");
        }
    }

    #[test]
    fn answers_of_the_guest_are_checked() {
        assert_eq!(
            read("found www-data\n").unwrap(),
            ("www-data".to_owned(), Disk::Unchanged)
        );
        let name = "a".repeat(MAX_NAME);
        assert!(read(&format!("missing {name}\n")).is_ok());
        assert!(read(&format!("missing {name}a\n")).is_err());
        for bad in [
            "",
            "found",
            "found \n",
            "missing -x\n",
            "missing a b\n",
            "missing a\nb\n",
            "missing a;b\n",
        ] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }
}
