//! `tpl create-from-image`.

use std::{io, path::PathBuf};

use clap::Args;
use rest::{BuildStep, ImageConfig, NewBuild, StartBuild};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::{
    answer,
    job::{self, Build, Job, Shown, settle},
    probe,
};
use crate::{
    attach::is_terminal,
    build::{RegistryArgs, begin},
    context::Context,
    failure::Failure,
    output::{Format, print, print_json},
};

/// Minimum free space of templates built from images, in MiB.
const USUAL_DISK_MIB: u64 = 4000;

#[derive(Args, Debug)]
pub(super) struct CreateArgs {
    /// Image, for example docker.io/library/python:3.12
    #[arg(long, value_name = "REF")]
    image: String,
    /// Disk space that sandboxes may write, for example 1G
    #[arg(long, value_name = "SIZE")]
    writable_layer_size: String,
    /// Port of a service; accepted for compatibility, because all ports of sandboxes are reachable
    #[arg(long = "expose-port", value_name = "PORT")]
    expose_ports: Vec<u16>,
    /// Port that must be ready before the snapshot, checked by HTTP or by a connection
    #[arg(long, value_name = "PORT")]
    probe: Option<u16>,
    /// Path of the probe, which must return 2xx
    #[arg(long, value_name = "PATH", requires = "probe")]
    probe_path: Option<String>,
    /// Id of the template, which is its name [default: derived from the image and the flags]
    #[arg(long, value_name = "ID", conflicts_with = "alias")]
    template_id: Option<String>,
    /// The same as --template-id
    #[arg(long)]
    alias: Option<String>,
    /// Word of the command that replaces the image's ENTRYPOINT; may be repeated
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    cmd: Vec<String>,
    /// Argument of that command; may be repeated
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    arg: Vec<String>,
    /// Environment variable; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// CPUs in thousandths
    #[arg(long, value_name = "MILLICORES")]
    cpu: Option<u32>,
    /// Memory in MB
    #[arg(long, value_name = "MB")]
    memory: Option<u32>,
    #[command(flatten)]
    registry: RegistryArgs,
    /// Return at once; the default without a terminal
    #[arg(long, visible_alias = "no-wait")]
    detach: bool,
    #[command(flatten)]
    unused: Unused,
}

/// Flags that have no meaning on this server.
#[derive(Args, Debug)]
struct Unused {
    #[arg(long, hide = true)]
    interval: Option<String>,
    #[arg(long, hide = true)]
    dns: Vec<String>,
    #[arg(long, hide = true, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    allow_internet_access: Option<bool>,
    #[arg(long, hide = true)]
    allow_out_cidr: Vec<String>,
    #[arg(long, hide = true)]
    deny_out_cidr: Vec<String>,
    #[arg(long, hide = true)]
    node: Vec<String>,
    #[arg(long, hide = true, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    with_cube_ca: Option<bool>,
    #[arg(long, hide = true)]
    enable_inject_envd: bool,
    #[arg(long, hide = true)]
    envd_path: Option<PathBuf>,
    #[arg(long, hide = true)]
    instance_type: Option<String>,
    #[arg(long, hide = true)]
    network_type: Option<String>,
    #[arg(long, hide = true)]
    enable_ivshmem: bool,
}

impl Unused {
    /// Warns readers of the guides about flags without effect.
    fn warn(&self) {
        let is_network = self.allow_internet_access.is_some()
            || !self.allow_out_cidr.is_empty()
            || !self.deny_out_cidr.is_empty()
            || !self.dns.is_empty();
        if is_network {
            eprintln!(
                "note: network options belong to sandboxes here: set them when you create one; the flags are ignored"
            );
        }
    }
}

pub(super) fn create(context: &Context, args: &CreateArgs) -> Result<(), Failure> {
    args.unused.warn();
    let (new, order) = (args.request()?, args.order()?);
    let mut server = context.server()?;
    let build = Build {
        build: begin(&mut server, &new, &order)?,
        template: new.name.unwrap_or_default(),
    };
    let job = settle(&mut server, &build)?;
    show(context, &job)?;
    let watches = !args.detach
        && !job.is_ready()
        && context.format == Format::Human
        && is_terminal(io::stdin())
        && is_terminal(io::stdout());
    if watches {
        return job::watch(&mut server, &build, Shown::Lines);
    }
    Ok(())
}

/// Prints the current state of a job.
pub(super) fn show(context: &Context, job: &Job) -> Result<(), Failure> {
    match context.format {
        Format::Human => print(&job.lines()),
        Format::Json => print_json(&answer(json!({"job": job.to_json()}))),
    }
}

impl CreateArgs {
    fn request(&self) -> Result<NewBuild, Failure> {
        let disk_mib = size_mib(&self.writable_layer_size)?;
        let disk_mib = Some(disk_mib).filter(|mib| *mib > USUAL_DISK_MIB);
        Ok(NewBuild {
            name: Some(self.name()),
            cpu_count: self.cpu.map(|cpu| i64::from(cpu.div_ceil(1000))),
            memory_mb: self.memory.map(i64::from),
            min_free_disk_mb: disk_mib.and_then(|mib| i64::try_from(mib).ok()),
            ..NewBuild::default()
        })
    }

    fn order(&self) -> Result<StartBuild, Failure> {
        if self.cmd.is_empty() && !self.arg.is_empty() {
            return Err(Failure::usage(
                "--arg without --cmd: the image's ENTRYPOINT is not known here",
            )
            .with_cure("give the whole command: --cmd PROGRAM --arg WORD …"));
        }
        let image = self.image.strip_prefix("http://");
        if image.is_some() {
            eprintln!("note: registries without TLS are set on the server: images.mirrors");
        }
        let words = [&self.cmd[..], &self.arg].concat();
        let env = self.env.iter().map(|pair| match pair.split_once('=') {
            Some((name, value)) => Ok([name.to_owned(), escaped(value)]),
            None => Err(Failure::usage(format!("--env {pair}: write NAME=VALUE"))),
        });
        let env: Vec<_> = env.collect::<Result<Vec<_>, _>>()?.concat();
        let step = BuildStep {
            kind: "ENV".to_owned(),
            args: Some(env.clone()),
            ..BuildStep::default()
        };
        Ok(StartBuild {
            from_image: Some(image.unwrap_or(&self.image).to_owned()),
            from_image_registry: self.registry.registry()?,
            steps: (!env.is_empty()).then(|| vec![step]),
            start_cmd: (!words.is_empty())
                .then(|| format!("exec {}", crate::dockerfile::script(&words))),
            ready_cmd: self
                .probe
                .map(|port| probe::script(port, self.probe_path.as_deref())),
            image_config: Some(ImageConfig::Start),
            ..StartBuild::default()
        })
    }

    fn name(&self) -> String {
        let chosen = self.template_id.as_ref().or(self.alias.as_ref());
        chosen.cloned().unwrap_or_else(|| self.fingerprint())
    }

    /// Default name of a template. The same flags give the same name.
    fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        let fields = format!(
            "{:?}",
            (
                &self.image,
                &self.writable_layer_size,
                self.probe,
                &self.probe_path,
                &self.cmd,
                &self.arg,
                &self.env,
                self.cpu,
                self.memory,
            )
        );
        hash.update(fields);
        let digits: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        format!("tpl-{}", digits.get(..24).unwrap_or_default())
    }
}

/// A value for ENV, in which the server expands variables and leaves everything else unchanged. Its syntax has no
/// escape for a dollar sign, so each one becomes the default of a variable that does not exist.
fn escaped(value: &str) -> String {
    value.replace('$', "${CUBE_NONE-$}")
}

/// Parses `1G`, `512M`, `2Gi` or `1024MB` to MiB.
fn size_mib(text: &str) -> Result<u64, Failure> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = match unit.trim().to_ascii_uppercase().as_str() {
        "M" | "MB" | "MI" | "MIB" => 1,
        "G" | "GB" | "GI" | "GIB" => 1024,
        "T" | "TB" | "TI" | "TIB" => 1024 * 1024,
        _ => 0,
    };
    let mib = number
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(scale));
    mib.filter(|mib| *mib > 0).ok_or_else(|| {
        Failure::usage(format!(
            "--writable-layer-size {text}: write a size such as 1G or 512M"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_variables_are_not_expanded() {
        let value = "a$b ${HOME} $$ $(id) $";
        let script = format!("printf %s \"{}\"", escaped(value));
        let output = std::process::Command::new("/bin/bash")
            .args(["-c", &script])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), value);
    }

    #[test]
    fn sizes_have_units() {
        for (text, mib) in [("1G", 1024), ("512M", 512), ("2Gi", 2048), ("1024MB", 1024)] {
            assert_eq!(size_mib(text).unwrap(), mib);
        }
        for bad in ["", "1", "G", "0G", "1X", "99999999999999999999G"] {
            assert!(size_mib(bad).is_err(), "{bad}");
        }
    }
}
