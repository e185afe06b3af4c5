//! `cube template build`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use rest::{ImageConfig, NewBuild, RequestedBuild, StartBuild};

use super::built;
use crate::{
    build::{Build, RegistryArgs, until_ready},
    context::Context,
    dockerfile::{self, Recipe},
    failure::Failure,
    progress::Style,
};

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("source").required(true).args(["image", "from", "file"]))]
pub(crate) struct BuildArgs {
    /// Name of the template: name or name:tag
    #[arg(value_name = "NAME")]
    name: String,
    /// Image to start from, for example python:3.12
    #[arg(long, value_name = "REF")]
    image: Option<String>,
    /// Template to start from: name, name:tag or id
    #[arg(long, value_name = "T")]
    from: Option<String>,
    /// Dockerfile to build; COPY takes files from the directory CONTEXT
    #[arg(short, long, value_name = "DOCKERFILE")]
    file: Option<PathBuf>,
    /// Directory of the files for COPY [default: the Dockerfile's]
    #[arg(value_name = "CONTEXT", conflicts_with_all = ["image", "from"])]
    context: Option<PathBuf>,
    /// Value of an ARG in the Dockerfile; NAME alone takes the value from the environment
    #[arg(long = "build-arg", value_name = "NAME=VALUE", conflicts_with_all = ["image", "from"])]
    build_args: Vec<String>,
    /// Command that runs in every sandbox of the template, started before the snapshot
    #[arg(long, value_name = "COMMAND")]
    start: Option<String>,
    /// Run the image's ENTRYPOINT and CMD as the start command
    #[arg(long, requires = "image", conflicts_with = "start")]
    start_image: bool,
    /// Command that succeeds once the start command is ready
    #[arg(long, value_name = "COMMAND")]
    ready: Option<String>,
    /// Memory of sandboxes, in MiB
    #[arg(long, value_name = "MIB")]
    memory: Option<u32>,
    /// Minimum disk space of sandboxes, in MiB
    #[arg(long, value_name = "MIB")]
    disk: Option<u32>,
    /// Run all steps, even those in the cache
    #[arg(long)]
    no_cache: bool,
    /// Do not wait for the end of the build
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    registry: RegistryArgs,
}

pub(super) fn build(context: &Context, args: &BuildArgs) -> Result<(), Failure> {
    // Read before anything is requested: an error in the file needs no server.
    let recipe = match &args.file {
        None => None,
        Some(file) => {
            let given = args.build_args()?;
            Some(dockerfile::read(file, args.context.as_deref(), &given)?)
        }
    };
    if let Some(Recipe { unused, .. }) = &recipe
        && !unused.is_empty()
    {
        let names = unused.join(" ");
        eprintln!(
            "cube: warning: one or more build-args [{names}] were not consumed: the Dockerfile has no ARG for them"
        );
    }
    let mut server = context.server()?;
    let requested: RequestedBuild = server.post("/v3/templates", &args.request())?;
    let build = Build::from(&requested);
    let mut order = args.order()?;
    if let Some(recipe) = recipe {
        recipe.upload(&mut server, &build.template_id)?;
        order.from_image = Some(recipe.image);
        order.steps = Some(recipe.steps);
        order.start_cmd = order.start_cmd.or(recipe.start);
    }
    build.start(&mut server, &order)?;
    if !args.detach {
        until_ready(&mut server, &build, &args.name, Style::of_stderr())?;
    }
    built(context, &build, args.detach)
}

impl BuildArgs {
    /// The last value of a name counts. A name without a value, here and in the environment, is ignored.
    fn build_args(&self) -> Result<dockerfile::BuildArgs, Failure> {
        let mut found = dockerfile::BuildArgs::new();
        for pair in &self.build_args {
            let (name, value) = match pair.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (pair.as_str(), std::env::var(pair).ok()),
            };
            if name.is_empty() {
                return Err(Failure::usage(format!(
                    "--build-arg {pair}: write NAME=VALUE, or NAME"
                )));
            }
            match value {
                Some(value) => found.insert(name.to_owned(), value),
                None => found.remove(name),
            };
        }
        Ok(found)
    }

    fn request(&self) -> NewBuild {
        NewBuild {
            name: Some(self.name.clone()),
            memory_mb: self.memory.map(i64::from),
            min_free_disk_mb: self.disk.map(i64::from),
            ..NewBuild::default()
        }
    }

    fn order(&self) -> Result<StartBuild, Failure> {
        let config = if self.start_image {
            ImageConfig::Start
        } else {
            ImageConfig::Defaults
        };
        Ok(StartBuild {
            from_image: self.image.clone(),
            from_template: self.from.clone(),
            from_image_registry: self.registry.registry()?,
            force: self.no_cache.then_some(true),
            steps: None,
            start_cmd: self.start.clone(),
            ready_cmd: self.ready.clone(),
            image_config: (self.from.is_none()).then_some(config),
        })
    }
}
