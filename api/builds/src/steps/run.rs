//! RUN: `[command, user?]`. The user applies to this step only.

use rest::LogLevel;

use super::{Disk, Done, Place, StepError};
use crate::command::Command;

pub(super) async fn perform(args: &[&str], place: &Place<'_>) -> Result<Done, StepError> {
    let command = command(args, place)?;
    let run = place.run(&command, LogLevel::Info).await;
    let script = &command.script;
    run.map_err(StepError::of(format!("failed to run command '{script}'")))?;
    Ok(Done {
        settings: place.settings.clone(),
        disk: Disk::Changed,
    })
}

fn command(args: &[&str], place: &Place<'_>) -> Result<Command, StepError> {
    let (script, user) = match args {
        [] => return Err(StepError::text("RUN requires command argument")),
        [script] => (script, None),
        [script, user, ..] => (script, Some(user)),
    };
    let mut command = Command {
        limit: Some(place.run_limit),
        ..Command::of_author(script, place.settings)
    };
    // The SDKs send an empty user if there is none.
    if let Some(user) = user.filter(|user| !user.is_empty()) {
        command.user = (*user).to_owned();
    }
    Ok(command)
}
