//! ENV and ARG: `[name, value, name, value…]`. Variables in values are expanded with the values from before the step.
//! Commands in values are not run.

use super::{Disk, Done, Place, StepError};
use crate::command::expanded;

/// Limit of all variables of a build together, names and values, in bytes. Linux allows a program's arguments and
/// variables a quarter of its stack limit of 8 MiB.
const MOST: usize = 512 << 10;

pub(super) async fn perform(args: &[&str], place: &Place<'_>) -> Result<Done, StepError> {
    let pairs = pairs(args)?;
    let names = pairs.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    let output = place.ask(&script(&pairs), &[]).await;
    let names = names.join(", ");
    let failed = format!("failed to evaluate environment variable {names}");
    let output = output.map_err(StepError::of(failed))?;
    let mut settings = place.settings.clone();
    for ((name, _), value) in pairs.iter().zip(output.split('\0')) {
        settings.env.insert((*name).to_owned(), value.to_owned());
    }
    let size: usize = settings.env.iter().map(|(n, v)| n.len() + v.len()).sum();
    if size > MOST {
        let text = format!("the environment has {size} bytes: the limit is {MOST}");
        return Err(StepError::Failed(text));
    }
    Ok(Done {
        settings,
        disk: Disk::Unchanged,
    })
}

fn pairs<'a>(args: &[&'a str]) -> Result<Vec<(&'a str, &'a str)>, StepError> {
    if args.is_empty() {
        return Err(StepError::text("ENV does not support passing no arguments"));
    }
    let (pairs, rest) = args.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(StepError::text(
            "ENV requires both a key and value arguments",
        ));
    }
    if let Some([name, _]) = pairs.iter().find(|[n, _]| n.is_empty() || n.contains('=')) {
        let text = format!("ENV has the invalid variable name {name:?}");
        return Err(StepError::Failed(text));
    }
    Ok(pairs.iter().map(|[name, value]| (*name, *value)).collect())
}

/// Prints the values, each followed by a NUL.
fn script(pairs: &[(&str, &str)]) -> String {
    let values = pairs.iter().map(|(_, value)| expanded(value));
    format!("printf '%s\\0' {}", values.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(args: &[&str]) -> String {
        pairs(args).unwrap_err().to_string()
    }

    #[test]
    fn arguments_are_pairs_of_a_name_and_a_value() {
        assert_eq!(
            pairs(&["A", "", "B", "="]).unwrap(),
            [("A", ""), ("B", "=")]
        );
        assert_eq!(refused(&[]), "ENV does not support passing no arguments");
        let odd = "ENV requires both a key and value arguments";
        assert_eq!(refused(&["A"]), odd);
        assert_eq!(refused(&["A", "1", "B"]), odd);
        assert!(refused(&["", "1"]).contains("invalid"));
        assert!(refused(&["A=B", "1"]).contains("A=B"));
    }

    #[test]
    fn all_values_are_printed_at_once() {
        let script = script(&[("A", "1 2"), ("B", ""), ("C", "$HOME\n%s")]);
        let shell = std::process::Command::new("/bin/bash")
            .args(["-c", &script])
            .env("HOME", "/h")
            .output()
            .unwrap();
        assert_eq!(shell.stdout, b"1 2\0\0/h\n%s\0");
    }
}
