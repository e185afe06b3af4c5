//! Templates of images for `cube run --image`. Each image has one name, so it is built once.

use std::{thread, time::Duration};

use clap::{Args, ValueEnum};
use rest::{BuildStatus, ImageConfig, NewBuild, StartBuild};
use sha2::{Digest, Sha256};

use crate::{
    attach::Signals,
    build::{self, Build, Ended, RegistryArgs},
    failure::{Failure, Kind},
    progress::{Display, Style},
    server::Server,
    template::builds,
};

/// Increase this when the same image and options give a different template.
const VERSION: &str = "cube run 1";
/// Hex digits of the digest in a name.
const DIGITS: usize = 12;
/// Part of the failure reason of a build that a newer one has ended.
const SUPERSEDED: &str = "superseded by a newer one";
/// Part of the error for starting a build that a newer request has ended.
const NOT_WAITING: &str = "waiting";
/// Maximum attempts while other runs build the same image.
const TRIES: u32 = 10;
const PERIOD: Duration = Duration::from_millis(200);
/// Longest readable part of a name.
const MAX_SHOWN: usize = 60;

#[derive(Args, Clone, Debug)]
pub(crate) struct ImageArgs {
    /// Image of the sandbox, for example python:3.12. Its template is built once; later runs start from it
    #[arg(long, value_name = "REF", conflicts_with = "template")]
    pub(crate) image: Option<String>,
    /// When to check for a newer image with that name
    #[arg(long, value_enum, default_value_t = Pull::Missing)]
    pub(crate) pull: Pull,
    /// Memory of the sandbox, in MiB [default: the server's]
    #[arg(long, value_name = "MIB", requires = "image")]
    pub(crate) memory: Option<u32>,
    #[command(flatten)]
    pub(crate) registry: RegistryArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pull {
    /// Only if no template was built from it
    Missing,
    /// Always; unchanged images and steps are not rebuilt
    Always,
}

/// Name of the template of an image with these options. The same options give the same name.
pub(crate) fn template_name(image: &str, memory: Option<u32>) -> String {
    let memory = memory.map(|mib| mib.to_string()).unwrap_or_default();
    let mut hash = Sha256::new();
    for field in [VERSION, image, &memory] {
        hash.update((field.len() as u64).to_le_bytes());
        hash.update(field.as_bytes());
    }
    let digest: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    let digest = digest.get(..DIGITS).unwrap_or_default();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let shown = image.rsplit('/').next().unwrap_or_default();
    let shown = shown.chars().take(MAX_SHOWN);
    let shown: String = shown.map(|c| if is_plain(c) { c } else { '-' }).collect();
    format!("image/{shown}-{digest}")
}

/// Builds the template of an image, with progress on standard error. `Some`: a signal arrived first; contains its
/// exit code.
pub(crate) fn build(
    server: &mut Server,
    args: &ImageArgs,
    image: &str,
    signals: &Signals,
) -> Result<Option<u8>, Failure> {
    let new = NewBuild {
        name: Some(template_name(image, args.memory)),
        memory_mb: args.memory.map(i64::from),
        ..NewBuild::default()
    };
    let order = StartBuild {
        from_image: Some(image.to_owned()),
        from_image_registry: args.registry.registry()?,
        image_config: Some(ImageConfig::Defaults),
        ..StartBuild::default()
    };
    let mut build = join_or_begin(server, &new, &order)?;
    let mut display = Display::new(image, Style::of_stderr());
    let goes_on = |_: &_, _: &_| signals.received().is_none();
    let mut tries = 1..TRIES;
    loop {
        let ended = build::follow(server, &build, &mut display, goes_on)?;
        let is_superseded =
            matches!(&ended, Ended::Failed(why) if why.message.contains(SUPERSEDED));
        if !is_superseded || tries.next().is_none() {
            return finished(image, ended, &mut display, signals);
        }
        build = join_or_begin(server, &new, &order)?;
    }
}

/// A build of this name that another run waits for, or a new one. A new build would end the other run's build.
fn join_or_begin(
    server: &mut Server,
    new: &NewBuild,
    order: &StartBuild,
) -> Result<Build, Failure> {
    let name = new.name.as_deref().unwrap_or_default();
    let mut tries = 1..TRIES;
    loop {
        if let Some(build) = under_way(server, name)? {
            return Ok(build);
        }
        match build::begin(server, new, order) {
            // Another run has requested a build after this one, and is about to start it.
            Err(why) if why.message.contains(NOT_WAITING) && tries.next().is_some() => {
                thread::sleep(PERIOD);
            }
            begun => return begun,
        }
    }
}

/// The running or queued build of a name.
fn under_way(server: &mut Server, name: &str) -> Result<Option<Build>, Failure> {
    let found = match builds(server, name) {
        Err(why) if why.kind == Kind::NotFound => return Ok(None),
        found => found?,
    };
    let running = found.builds.into_iter();
    let mut running = running.filter(|build| build.status == BuildStatus::Building);
    Ok(running.next().map(|running| Build {
        template_id: found.template_id,
        build_id: running.build_id,
    }))
}

fn finished(
    image: &str,
    ended: Ended,
    display: &mut Display,
    signals: &Signals,
) -> Result<Option<u8>, Failure> {
    match ended {
        Ended::Ready => Ok(None),
        Ended::Left => {
            display.finish();
            eprintln!("cube: the build continues; the next run will use its result");
            Ok(signals.received())
        }
        Ended::Failed(reason) => Err(build::failed(&format!("image {image}"), &reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_image_has_the_same_template() {
        let name = template_name("python:3.12", None);
        assert_eq!(name, template_name("python:3.12", None));
        assert!(name.starts_with("image/python-3.12-"), "{name}");
        let others = [
            template_name("python:3.12", Some(512)),
            template_name("python:3.13", None),
            template_name("python-3.12", None),
            template_name("ghcr.io/x/python:3.12", None),
        ];
        assert!(others.iter().all(|other| *other != name));
        let long = template_name(&format!("a/{}@sha256:ü", "x".repeat(300)), None);
        assert!(long.len() <= 128 && long.is_ascii(), "{long}");
    }
}
