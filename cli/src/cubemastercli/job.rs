//! Builds, shown as jobs as in the guides: the job id is the build id, and the fields have the guides' names.

use std::time::Duration;

use envd::one_line;
use rest::{BuildInfo, BuildStatus, SnapshotInfo, Template};
use serde_json::{Value, json};

use super::answer;
use crate::{
    build::{self, Ended, failed, follow},
    failure::Failure,
    output::{Format, print, print_json},
    progress::{Display, Phase, Progress, Style},
    server::Server,
    template::{builds, templates},
};

/// A build, and its template's id in the sense of these commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Build {
    pub(super) build: build::Build,
    pub(super) template: String,
}

/// The id of a template in the sense of these commands: its name if it has one, which is accepted wherever an id
/// is. An id can therefore be chosen, or is derived from the flags, as in the guides.
pub(super) fn template_id<'a>(id: &'a str, names: &'a [String]) -> &'a str {
    names.first().map_or(id, String::as_str)
}

/// A job in the form of the guides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) job_id: String,
    pub(super) template_id: String,
    pub(super) status: &'static str,
    pub(super) phase: &'static str,
    pub(super) percent: u64,
    layers: Option<(u64, u64)>,
    /// Fingerprint of image, steps and commands; empty until the build has ended.
    fingerprint: String,
    /// Fingerprint of the root image.
    artifact: String,
    /// Why the job failed.
    error: String,
}

impl Job {
    pub(super) fn new(build: &Build) -> Self {
        Self {
            job_id: build.build.build_id.clone(),
            template_id: build.template.clone(),
            status: "PENDING",
            phase: "PULLING",
            ..Self::default()
        }
    }

    /// The job of a snapshot, which is complete as soon as the snapshot exists.
    pub(super) fn committed(snapshot: &SnapshotInfo) -> Self {
        Self {
            job_id: snapshot.snapshot_id.clone(),
            template_id: template_id(&snapshot.snapshot_id, &snapshot.names).to_owned(),
            status: "READY",
            phase: "READY",
            percent: 100,
            ..Self::default()
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status == "READY"
    }

    /// Takes over a state of the build.
    fn update(&mut self, info: &BuildInfo, progress: &Progress) {
        for entry in &info.log_entries {
            let key = entry
                .message
                .rsplit_once('[')
                .map(|(_, key)| key.trim_end_matches(']'));
            let key = key.unwrap_or_default().to_owned();
            if entry.message.contains("[base] FROM ") {
                self.artifact = key;
            } else if entry.message.contains("[finalize] ") {
                self.fingerprint = key;
            }
        }
        (self.phase, self.percent) = match progress.phase {
            Phase::Waiting => ("PULLING", 0),
            Phase::Pulling => {
                let (done, all) = (progress.bytes.done, progress.bytes.all);
                let part = done.saturating_mul(50).checked_div(all).unwrap_or(0);
                ("PULLING", part.min(50))
            }
            Phase::Converting => ("BUILDING", 50),
            Phase::Building => ("BUILDING", 60),
            Phase::Finalizing => ("DISTRIBUTING", 80),
        };
        self.error = info
            .reason
            .as_ref()
            .map_or_else(String::new, |reason| reason.message.clone());
        let layers = progress.layers;
        self.layers = (layers.all > 0).then_some((layers.done, layers.all));
        self.status = match info.status {
            BuildStatus::Waiting => "PENDING",
            BuildStatus::Building => "RUNNING",
            BuildStatus::Ready => {
                (self.phase, self.percent) = ("READY", 100);
                "READY"
            }
            BuildStatus::Error => "FAILED",
        };
    }

    /// The current state of a job as lines.
    pub(super) fn lines(&self) -> String {
        let end = match self.status {
            "READY" => self.outcome(),
            "FAILED" => format!("error:       {}\n", one_line(&self.error)),
            _ => String::new(),
        };
        format!(
            "job_id:      {}\ntemplate_id: {}\nattempt_no:  1\nartifact_id:\nstatus:      {}\nphase:       {}\n\
             progress:    {}%\n{end}",
            one_line(&self.job_id),
            one_line(&self.template_id),
            self.status,
            self.phase,
            self.percent
        )
    }

    /// The line for a change.
    fn line(&self) -> String {
        let (status, phase, percent) = (self.status, self.phase, self.percent);
        let layers = self.layers.map_or(String::new(), |(done, all)| {
            format!("  pull_layers: {done}/{all}")
        });
        format!("status: {status}  phase: {phase}  progress: {percent}%{layers}\n")
    }

    /// The lines for a job that has succeeded.
    fn ready(&self) -> String {
        let outcome = self.outcome();
        format!("status: READY\nphase: READY\nprogress: 100%\n{outcome}")
    }

    /// The last of these lines.
    fn outcome(&self) -> String {
        format!(
            "distribution: 1/1 ready, 0 failed\n\
             template_spec_fingerprint: {}\nartifact_status: READY\nartifact_sha256: {}\ntemplate_status: READY\n",
            self.fingerprint, self.artifact
        )
    }

    pub(super) fn to_json(&self) -> Value {
        let (done, all) = self.layers.unwrap_or_default();
        let is_ready = self.is_ready();
        json!({
            "job_id": self.job_id, "template_id": self.template_id, "attempt_no": 1, "artifact_id": "",
            "status": self.status, "phase": self.phase, "progress": self.percent,
            "pull_completed_layers": done, "pull_total_layers": all, "expected_node_count": 1,
            "ready_node_count": u8::from(is_ready), "failed_node_count": u8::from(self.status == "FAILED"),
            "template_spec_fingerprint": self.fingerprint, "artifact": {"sha256": self.artifact},
            "artifact_status": if is_ready { "READY" } else { "" },
            "template_status": match self.status { "READY" | "FAILED" => self.status, _ => "PENDING" },
            "error_message": self.error,
        })
    }
}

/// Result of looking up a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Build(Build),
    /// The job of a commit.
    Snapshot(SnapshotInfo),
}

/// The build or the snapshot of a job.
pub(super) fn find(server: &mut Server, job_id: &str) -> Result<Found, Failure> {
    if let Some(build) = find_build(server, job_id)? {
        return Ok(Found::Build(build));
    }
    let mut snapshots = snapshots(server)?.into_iter();
    let snapshot = snapshots.find(|snapshot| snapshot.snapshot_id == job_id);
    snapshot.map(Found::Snapshot).ok_or_else(|| {
        Failure::refused(format!("job {job_id} was not found")).with_cure(
            "`cubemastercli tpl list` shows templates; a removed template takes its jobs along",
        )
    })
}

pub(super) fn snapshots(server: &mut Server) -> Result<Vec<SnapshotInfo>, Failure> {
    server.pages("/snapshots?limit=100")
}

/// A template's list entry names only one of its builds; the details list the others.
fn find_build(server: &mut Server, job_id: &str) -> Result<Option<Build>, Failure> {
    let all = templates(server)?;
    let of = |template: &Template| Build {
        build: build::Build {
            template_id: template.template_id.clone(),
            build_id: job_id.to_owned(),
        },
        template: template_id(&template.template_id, &template.aliases).to_owned(),
    };
    if let Some(template) = all.iter().find(|template| template.build_id == job_id) {
        return Ok(Some(of(template)));
    }
    for template in all.iter().filter(|template| template.build_count > 1) {
        let found = builds(server, &template.template_id)?;
        if found.builds.iter().any(|build| build.build_id == job_id) {
            return Ok(Some(of(template)));
        }
    }
    Ok(None)
}

/// Reads the current state of a job.
pub(super) fn status(server: &mut Server, build: &Build) -> Result<Job, Failure> {
    let (mut job, mut progress, mut offset) = (Job::new(build), Progress::default(), 0);
    loop {
        let info = build.build.status(server, offset)?;
        offset += info.log_entries.len();
        for entry in &info.log_entries {
            progress.add(&entry.message);
        }
        job.update(&info, &progress);
        if info.log_entries.is_empty() {
            return Ok(job);
        }
    }
}

/// Output of a watcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    Lines,
    /// Only the final state.
    Json,
}

impl Shown {
    pub(super) fn of(format: Format) -> Self {
        match format {
            Format::Human => Self::Lines,
            Format::Json => Self::Json,
        }
    }
}

/// Follows a job to its end.
pub(super) fn watch(server: &mut Server, build: &Build, shown: Shown) -> Result<(), Failure> {
    let (mut job, mut last) = (Job::new(build), String::new());
    let mut display = Display::new(&build.build.build_id, Style::Nothing);
    let ended = follow(server, &build.build, &mut display, |info, display| {
        job.update(info, display.progress());
        let line = job.line();
        let is_new = line != last && !matches!(info.status, BuildStatus::Ready);
        if shown == Shown::Lines && is_new {
            last.clone_from(&line);
            // Stop when the reader is gone.
            return print(&line).is_ok();
        }
        true
    })?;
    if shown == Shown::Json {
        print_json(&answer(json!({"job": job.to_json()})))?;
    }
    match ended {
        Ended::Ready if shown == Shown::Lines => print(&job.ready()),
        Ended::Ready | Ended::Left => Ok(()),
        Ended::Failed(reason) => Err(failed(&format!("template {}", build.template), &reason)),
    }
}

/// Waits briefly for a job that has nothing to do because the same template was built before.
pub(super) fn settle(server: &mut Server, build: &Build) -> Result<Job, Failure> {
    const TRIES: u32 = 10;
    let mut job = status(server, build)?;
    for _ in 0..TRIES {
        if !matches!(job.status, "PENDING" | "RUNNING") || job.layers.is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
        job = status(server, build)?;
    }
    Ok(job)
}

#[cfg(test)]
mod tests {
    use rest::StatusReason;

    use super::*;

    fn job() -> Job {
        Job::new(&Build {
            build: build::Build {
                template_id: "0123".to_owned(),
                build_id: "b1".to_owned(),
            },
            template: "t1".to_owned(),
        })
    }

    #[test]
    fn lines_are_those_of_the_guides() {
        assert_eq!(
            job().lines(),
            "job_id:      b1\ntemplate_id: t1\nattempt_no:  1\nartifact_id:\nstatus:      PENDING\nphase:       PULLING\n\
             progress:    0%\n"
        );
        let mut progress = Progress::default();
        progress.add("Base Docker image size: 10 MB in 7 layers");
        progress.add("Pulled layer sha256:a 5.0 MB");
        let mut job = job();
        let info = |status, log_entries: Vec<_>| BuildInfo {
            template_id: "t1".to_owned(),
            build_id: "b1".to_owned(),
            status,
            logs: Vec::new(),
            log_entries,
            reason: None,
        };
        job.update(&info(BuildStatus::Building, Vec::new()), &progress);
        let line = "status: RUNNING  phase: PULLING  progress: 25%  pull_layers: 1/7\n";
        assert_eq!(job.line(), line);
        job.update(&info(BuildStatus::Ready, Vec::new()), &progress);
        assert!(job.ready().contains("distribution: 1/1 ready, 0 failed\n"));
        assert_eq!(job.to_json()["template_status"], "READY");
        assert!(job.lines().ends_with("template_status: READY\n"));
        let failed = BuildInfo {
            reason: Some(StatusReason {
                message: "no such image\n".to_owned(),
                step: None,
                log_entries: Vec::new(),
            }),
            ..info(BuildStatus::Error, Vec::new())
        };
        job.update(&failed, &progress);
        assert!(
            job.lines().ends_with("error:       no such image\\n\n"),
            "{}",
            job.lines()
        );
        assert_eq!(job.to_json()["error_message"], "no such image\n");
    }
}
