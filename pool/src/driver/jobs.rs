//! Starts the jobs, on threads and tasks. Each job reports its end to the driver.

use std::{fs, io, os::fd::OwnedFd, path::PathBuf, sync::Arc};

use model::{SandboxId, template_file};
use tokio::{sync::mpsc, task::spawn_blocking};
use vmm_control::template::LoadedTemplate;

use crate::{
    PoolConfig, PoolError, TemplateInfo,
    cgroup::Groups,
    message::{Answer, Report, SnapshotFor},
    network,
    record::{Durability, Record, SlotDir},
    recover::Leftovers,
    vm::Vm,
    work::{
        self,
        adopt::{AdoptPausedPlan, AdoptPlan},
        lease::{LeasePlan, Lines, serve},
        save::{PausePlan, SnapshotPlan},
        start::StartPlan,
    },
};

/// Page size of loaded templates, in bytes.
const HUGE_PAGE: u64 = 2 << 20;

#[derive(Debug)]
pub(super) struct Jobs {
    config: Arc<PoolConfig>,
    pub(super) groups: Arc<Groups>,
    pub(super) reporter: mpsc::UnboundedSender<Report>,
    /// Sum of the sizes of all templates that this server has loaded, in bytes.
    loaded: u64,
}

impl Jobs {
    pub(super) fn new(
        config: Arc<PoolConfig>,
        groups: Arc<Groups>,
        reporter: mpsc::UnboundedSender<Report>,
    ) -> Self {
        Self {
            config,
            groups,
            reporter,
            loaded: 0,
        }
    }

    /// Runs blocking work on a thread. The report is lost only if the driver has ended.
    fn run(&self, work: impl FnOnce() -> Report + Send + 'static) {
        let reporter = self.reporter.clone();
        spawn_blocking(move || {
            let _ = reporter.send(work());
        });
    }

    pub(super) fn adopt(&self, plan: AdoptPlan) {
        self.run(move || Report::Adopted(plan.id.clone(), plan.run()));
    }

    pub(super) fn adopt_paused(&self, plan: AdoptPausedPlan) {
        self.run(move || {
            let id = plan.id.clone();
            plan.run();
            Report::Adopted(id, Ok(None))
        });
    }

    /// Removes what a former server left.
    pub(super) fn sweep(&self, leftovers: Leftovers) {
        let (groups, patience) = (Arc::clone(&self.groups), self.config.start_timeout);
        self.run(move || {
            leftovers.sweep(&groups, patience);
            Report::Swept
        });
    }

    /// Makes a VM for a fill, a cold start or a resume.
    pub(super) fn start(&self, id: SandboxId, plan: StartPlan) {
        self.run(move || Report::Made(id, plan.run().map(Box::new)));
    }

    /// Leases a warm slot. Runs on a task rather than a thread, because a caller waits for it.
    pub(super) fn lease(&self, plan: LeasePlan, lines: Lines) {
        let reporter = self.reporter.clone();
        tokio::spawn(async move {
            let id = plan.id.clone();
            let served = serve(plan, lines).await.map(Box::new);
            let _ = reporter.send(Report::Leased(id, served));
        });
    }

    pub(super) fn pause(&self, id: SandboxId, plan: PausePlan) {
        self.run(move || Report::Paused(id, Box::new(plan.run())));
    }

    pub(super) fn snapshot(&self, id: SandboxId, plan: SnapshotPlan, purpose: SnapshotFor) {
        self.run(move || Report::Snapshotted(id, purpose, plan.run()));
    }

    /// Writes the record of a running sandbox.
    pub(super) fn write(&self, id: SandboxId, dir: SlotDir, record: Record) {
        self.run(move || Report::Written(id, dir.write(&record, Durability::Process)));
    }

    /// Copies a template's memory into huge pages. These are charged to the server's control group, so its limit, if
    /// there is one, grows by their size. The limit never shrinks again, because VMMs may still hold the memory of a
    /// template that was removed.
    ///
    /// # Errors
    /// Returns an error if the size cannot be read or the limit cannot be set. Nothing is loaded then. A failure to
    /// load is reported by [`Report::Loaded`].
    pub(super) fn load(&mut self, template: String, dir: PathBuf) -> io::Result<()> {
        if let Some(memory) = self.config.server_memory {
            let size = fs::metadata(dir.join(template_file::MEMORY))?.len();
            self.loaded += size.next_multiple_of(HUGE_PAGE);
            let limit = memory.0.saturating_add(self.loaded);
            self.groups.limit_server(limit)?;
        }
        self.run(move || {
            let loaded = LoadedTemplate::load(&dir);
            let loaded = loaded.map(Arc::new).map_err(|e| model::chain(&e));
            Report::Loaded(template, loaded)
        });
        Ok(())
    }

    /// Kills a VM process. If `disown` is given, the record in that directory is removed first, so that the next server
    /// does not adopt a sandbox that was about to end.
    pub(super) fn kill(&self, id: SandboxId, pidfd: Arc<OwnedFd>, disown: Option<SlotDir>) {
        spawn_blocking(move || {
            if let Some(Err(error)) = disown.map(|dir| dir.disown()) {
                tracing::error!(sandbox = %id, %error, "cannot remove the sandbox's record");
            }
            crate::vm::kill(&pidfd);
        });
    }

    /// Releases the TAP of a VM that has exited.
    pub(super) fn release(&self, record: &mut Record) {
        self.run(self.release_tap(record));
    }

    fn release_tap(&self, record: &mut Record) -> impl FnOnce() -> Report + Send + use<> {
        let (tap, vmm) = (record.tap.take(), record.vmm);
        let network = self.config.network.clone();
        move || Report::Released(network::release(network.as_ref(), tap, vmm))
    }

    /// Releases a slot's TAP, and removes its directory and its control group.
    pub(super) fn clean(&self, id: SandboxId, dir: SlotDir, record: &mut Record) {
        let groups = Arc::clone(&self.groups);
        let released = self.release_tap(record);
        let reporter = self.reporter.clone();
        self.run(move || {
            let _ = reporter.send(released());
            if let Err(error) = work::save::clean(&dir, &groups, id.as_str()) {
                tracing::error!(sandbox = %id, %error, "cannot remove all of the sandbox; the next server tries again");
            }
            Report::Cleaned(id)
        });
    }

    /// Watches a VM process and reports its exit.
    pub(super) fn watch(&self, id: SandboxId, vm: Vm) {
        let reporter = self.reporter.clone();
        tokio::spawn(async move {
            if let Err(error) = vm.exited().await {
                tracing::error!(sandbox = %id, %error, "cannot watch the sandbox's VMM");
            }
            let _ = reporter.send(Report::VmExited(id));
        });
    }

    /// Answers the request for a new template, after syncing the template to disk or, if it failed, removing its
    /// directory.
    pub(super) fn finish_template(
        &self,
        home: PathBuf,
        kept: Result<TemplateInfo, PoolError>,
        answer: Answer<TemplateInfo>,
    ) {
        spawn_blocking(move || {
            match &kept {
                Ok(_) => work::save::sync_tree(&home),
                Err(_) => drop(fs::remove_dir_all(&home)),
            }
            let _ = answer.send(kept);
        });
    }
}
