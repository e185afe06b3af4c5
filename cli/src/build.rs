//! Builds of templates: request, start, and the log until the end.

use std::{thread, time::Duration};

use clap::Args;
use rest::{
    BuildInfo, BuildStatus, ImageRegistry, NewBuild, RedoTemplate, RequestedBuild, StartBuild,
    StatusReason,
};

use crate::{
    failure::Failure,
    progress::{Display, Style},
    server::{Server, segment},
    template::UNKNOWN,
};

/// Interval between two polls of a build, as in the SDKs.
const PERIOD: Duration = Duration::from_millis(200);

/// Credentials for a registry.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct RegistryArgs {
    /// User name at the image's registry
    #[arg(
        long,
        env = "CUBE_REGISTRY_USERNAME",
        value_name = "NAME",
        hide_env_values = true
    )]
    pub(crate) registry_username: Option<String>,
    /// Password or token at the image's registry
    #[arg(
        long,
        env = "CUBE_REGISTRY_PASSWORD",
        value_name = "TEXT",
        hide_env_values = true
    )]
    pub(crate) registry_password: Option<String>,
}

impl RegistryArgs {
    pub(crate) fn registry(&self) -> Result<Option<ImageRegistry>, Failure> {
        match (&self.registry_username, &self.registry_password) {
            (None, None) => Ok(None),
            (Some(username), Some(password)) => Ok(Some(ImageRegistry::Registry {
                username: username.clone(),
                password: password.clone(),
            })),
            _ => Err(
                Failure::usage("a registry needs a user name and a password")
                    .with_cure("set both CUBE_REGISTRY_USERNAME and CUBE_REGISTRY_PASSWORD"),
            ),
        }
    }
}

/// A build on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Build {
    pub(crate) template_id: String,
    pub(crate) build_id: String,
}

impl From<&RequestedBuild> for Build {
    fn from(requested: &RequestedBuild) -> Self {
        Self {
            template_id: requested.template_id.clone(),
            build_id: requested.build_id.clone(),
        }
    }
}

impl Build {
    fn path(&self) -> String {
        let (template, build) = (segment(&self.template_id), segment(&self.build_id));
        format!("/templates/{template}/builds/{build}")
    }

    /// Its state, with the log starting at an offset.
    pub(crate) fn status(&self, server: &mut Server, offset: usize) -> Result<BuildInfo, Failure> {
        server.get(&format!("{}/status?logsOffset={offset}", self.path()))
    }

    pub(crate) fn start(&self, server: &mut Server, order: &StartBuild) -> Result<(), Failure> {
        server.send("POST", &format!("/v2{}", self.path()), order)
    }
}

/// Requests and starts a build without files.
pub(crate) fn begin(
    server: &mut Server,
    new: &NewBuild,
    order: &StartBuild,
) -> Result<Build, Failure> {
    let requested: RequestedBuild = server.post("/v3/templates", new)?;
    let build = Build::from(&requested);
    build.start(server, order)?;
    Ok(build)
}

/// Repeats the build of a template, from the server's record of it.
pub(crate) fn begin_redo(
    server: &mut Server,
    template: &str,
    skip_cache: bool,
    registry: Option<ImageRegistry>,
) -> Result<Build, Failure> {
    let request = RedoTemplate {
        skip_cache,
        from_image_registry: registry,
    };
    let path = format!("/templates/{}/redo", segment(template));
    let requested: RequestedBuild = server
        .post(&path, &request)
        .map_err(|why| why.if_not_found(UNKNOWN))?;
    Ok(Build::from(&requested))
}

/// Outcome of following a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Ready,
    Failed(StatusReason),
    /// The caller stopped following. The build continues.
    Left,
}

/// Follows a build to its end. `look` receives each state, and returns whether to continue.
pub(crate) fn follow(
    server: &mut Server,
    build: &Build,
    display: &mut Display,
    mut look: impl FnMut(&BuildInfo, &Display) -> bool,
) -> Result<Ended, Failure> {
    let mut offset = 0;
    loop {
        let info = build.status(server, offset)?;
        offset += info.log_entries.len();
        for entry in &info.log_entries {
            display.add(entry);
        }
        if !look(&info, display) {
            return Ok(Ended::Left);
        }
        let has_more = !info.log_entries.is_empty();
        match info.status {
            // Print the rest of the log first.
            BuildStatus::Ready | BuildStatus::Error if has_more => {}
            BuildStatus::Ready => return Ok(Ended::Ready),
            BuildStatus::Error => return Ok(Ended::Failed(reason(info))),
            BuildStatus::Waiting | BuildStatus::Building => {
                display.tick();
                thread::sleep(PERIOD);
            }
        }
    }
}

fn reason(info: BuildInfo) -> StatusReason {
    info.reason.unwrap_or(StatusReason {
        message: "the server names no reason".to_owned(),
        step: None,
        log_entries: Vec::new(),
    })
}

/// Failure of a build, for the user.
pub(crate) fn failed(name: &str, reason: &StatusReason) -> Failure {
    let step = match reason.step.as_deref() {
        None => String::new(),
        Some("base") => " before its first step".to_owned(),
        Some("finalize") => " at its end (start command, ready command or snapshot)".to_owned(),
        Some(number) => format!(" in step {number}"),
    };
    let message = envd::guest_text(&reason.message);
    Failure::refused(format!("the build of {name} failed{step}: {message}"))
}

/// Follows a build that must become ready.
pub(crate) fn until_ready(
    server: &mut Server,
    build: &Build,
    name: &str,
    style: Style,
) -> Result<(), Failure> {
    let mut display = Display::new(name, style);
    match follow(server, build, &mut display, |_, _| true)? {
        Ended::Ready | Ended::Left => Ok(()),
        Ended::Failed(reason) => Err(failed(name, &reason)),
    }
}
