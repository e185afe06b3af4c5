//! The steps, in order. Each may use what earlier ones left; after a failure the rest is not run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, bail, ensure};
use model::{Bytes, MANIFEST_NAME, TemplateManifest, template_file};

use crate::{
    confinement::{STATE, prove},
    tap::{self, Tap},
    vm::{MEMORY, Vm},
};

/// Where things are.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) vmm: PathBuf,
    /// The program that has the confinement prover.
    pub(crate) bench: PathBuf,
    pub(crate) guest: PathBuf,
    /// An empty directory with a short path.
    pub(crate) work: PathBuf,
    /// Part of the names of the steps to run.
    pub(crate) only: Option<String>,
    /// Cases and classes of the confinement prover to try instead of running the steps; empty: all cases.
    pub(crate) cases: Option<Vec<String>>,
    /// A place that a host with another CPU will see, on an emulated one.
    pub(crate) kept: Option<PathBuf>,
    /// Features that this host lacks and the one of the kept template had.
    pub(crate) lacking: Option<String>,
}

/// Template of a VM with 4 vCPUs.
const SMP: &str = "smp";
/// Classes that the confinement prover has at least.
const CLASSES: usize = 16;

/// What steps hand on.
#[derive(Debug)]
struct Run<'a> {
    places: &'a Places,
    tap: Option<Tap>,
    vm: Option<Vm>,
    clones: Vec<Vm>,
}

type Step = (&'static str, fn(&mut Run<'_>) -> Result<String>);

const STEPS: [Step; 19] = [
    ("probe", probe),
    ("boot to the agent", boot),
    ("exec", exec),
    ("disk under load", disk),
    ("vsock under load", vsock),
    ("network under load", network),
    ("snapshot", snapshot),
    ("whole image read", whole_image),
    ("restore twice", restore_twice),
    ("identities differ", identities),
    ("snapshot of a clone", second_generation),
    ("diff of a clone", diff),
    ("4 vCPUs", four_vcpus),
    ("confinement", confinement),
    ("more than 3 GiB", above_the_hole),
    ("ends are told apart", ends),
    ("kill -9", kill),
    ("bad snapshots", bad_snapshots),
    ("kept for another CPU", keep),
];
/// The steps of a host whose CPU lacks what that of the others had.
const STEPS_OF_LESSER_CPU: [Step; 2] = [("probe", probe), ("a lesser CPU", lesser_cpu)];

/// Those that the confinement prover needs, and the prover.
const STEPS_OF_PROVER: [Step; 4] = [
    ("probe", probe),
    ("boot to the agent", boot),
    ("snapshot", snapshot),
    ("chosen cases", chosen_cases),
];

/// Runs them all, or those of a lesser CPU or the prover.
pub(crate) fn run(places: &Places) -> Result<()> {
    match places.lacking {
        None if places.cases.is_some() => perform(places, &STEPS_OF_PROVER),
        None => perform(places, &STEPS),
        Some(_) => perform(places, &STEPS_OF_LESSER_CPU),
    }
}

fn perform(places: &Places, steps: &[Step]) -> Result<()> {
    let mut run = Run {
        places,
        tap: None,
        vm: None,
        clones: Vec::new(),
    };
    let whole = Instant::now();
    for (name, step) in steps {
        println!("begin {name}");
        let start = Instant::now();
        let done = step(&mut run);
        let seconds = start.elapsed().as_secs_f64();
        match done {
            Ok(note) => println!("step {name:<20} passed {seconds:6.2} s  {note}"),
            Err(error) => {
                println!("step {name:<20} FAILED {seconds:6.2} s");
                let vms = run.vm.iter().chain(&run.clones);
                vms.for_each(|vm| println!("{}: {}", vm.hostname, vm.last_words()));
                return Err(error.context(format!("step {name:?}")));
            }
        }
        if places
            .only
            .as_deref()
            .is_some_and(|only| name.contains(only))
        {
            break;
        }
    }
    println!("all steps passed in {:.1} s", whole.elapsed().as_secs_f64());
    Ok(())
}

impl Run<'_> {
    fn vm(&mut self) -> Result<&mut Vm> {
        self.vm.as_mut().context("no VM runs")
    }

    fn template(&self, name: &str) -> PathBuf {
        self.places.work.join(name)
    }
}

fn probe(run: &mut Run<'_>) -> Result<String> {
    let output = Command::new(&run.places.vmm).arg("probe").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let found: serde_json::Value = serde_json::from_str(&text)
        .with_context(|| format!("{text:?} {}", String::from_utf8_lossy(&output.stderr)))?;
    ensure!(found["platform"] == "hvm", "{text}");
    Ok(found["why"].as_str().unwrap_or_default().to_owned())
}

fn boot(run: &mut Run<'_>) -> Result<String> {
    let tap = Tap::open()?;
    run.vm = Some(Vm::boot(run.places, (MEMORY, 1), Some(&tap))?);
    run.tap = Some(tap);
    Ok(String::new())
}

fn exec(run: &mut Run<'_>) -> Result<String> {
    let vm = run.vm()?;
    let clock = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let said = vm.sh(&format!("uname -r; hostname; cat {clock}; whoami"))?;
    let lines: Vec<_> = said.lines().collect();
    let [release, hostname, clock, user] = lines[..] else {
        bail!("{said:?}");
    };
    ensure!(hostname == vm.hostname && user == "root", "{said:?}");
    ensure!(clock == "kvm-clock", "the guest's clock is {clock}");
    Ok(format!("Linux {release}, {clock}"))
}

/// Writes and reads back 64 MiB past the guest's page cache.
fn disk(run: &mut Run<'_>) -> Result<String> {
    let sums = run.vm()?.sh("cd /var/tmp
        dd if=/dev/urandom of=a bs=1M count=4 status=none
        for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do cat a; done > b
        sync; cksum < b; echo 3 > /proc/sys/vm/drop_caches; cksum < b; rm b")?;
    let lines: Vec<_> = sums.lines().collect();
    ensure!(
        lines.len() == 2 && lines[0] == lines[1] && lines[0].ends_with(" 67108864"),
        "{sums:?}"
    );
    Ok("64 MiB written and read back".to_owned())
}

/// A file to the agent and back: bulk data on a stream in both directions.
fn vsock(run: &mut Run<'_>) -> Result<String> {
    const BYTES: u32 = 8 << 20;
    let data: Vec<u8> = (0..BYTES / 4)
        .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    let vm = run.vm()?;
    let mut agent = vm.agent()?;
    agent.write_file("/tmp/echo", &data, Some("root"))?;
    let back = agent.read_file("/tmp/echo", Some("root"))?;
    ensure!(back == data, "{} bytes came back changed", back.len());
    Ok("8 MiB there and back".to_owned())
}

fn network(run: &mut Run<'_>) -> Result<String> {
    let port = tap::echo_server()?;
    let (host, guest) = (tap::HOST, tap::GUEST);
    let vm = run.vm()?;
    vm.sh(&format!(
        "ip address add {guest}/30 dev eth0; ip link set eth0 up
        exec 3<>/dev/tcp/{host}/{port}
        head -c 2M /tmp/echo > /tmp/small; cat /tmp/small >&3 &
        head -c 2M <&3 | cmp - /tmp/small
        wait; exec 3>&-; rm /tmp/echo /tmp/small; ip address flush dev eth0"
    ))?;
    Ok("2 MiB there and back".to_owned())
}

fn snapshot(run: &mut Run<'_>) -> Result<String> {
    let template = run.template("one");
    let vm = run.vm()?;
    vm.sh("echo kept > /root/mark; sync")?;
    vm.process.control.snapshot(&template)?;
    let memory = fs::metadata(template.join(template_file::MEMORY))?;
    let state = fs::metadata(template.join(template_file::STATE))?.len();
    let stored = std::os::unix::fs::MetadataExt::blocks(&memory) / 2048;
    // The VM goes on.
    vm.process.control.resume()?;
    ensure!(vm.sh("cat /root/mark")? == "kept", "the VM lost a file");
    Ok(format!("memory {stored} MiB, state {state} bytes"))
}

/// The guest reads every byte of its root image; the sum is the one that the VMM made.
fn whole_image(run: &mut Run<'_>) -> Result<String> {
    let manifest = manifest(&run.template("one"))?;
    let sum = run.vm()?.sh("sha256sum < /dev/vda")?;
    let sum = sum.split_whitespace().next().unwrap_or_default();
    ensure!(sum == manifest.root_sum.sha256, "{sum}");
    run.vm = None;
    Ok(format!("{} bytes", manifest.root_sum.bytes))
}

fn manifest(template: &Path) -> Result<TemplateManifest> {
    Ok(serde_json::from_slice(&fs::read(
        template.join(MANIFEST_NAME),
    )?)?)
}

fn restore_twice(run: &mut Run<'_>) -> Result<String> {
    let template = run.template("one");
    let mut times = Vec::new();
    for _ in 0..2 {
        let start = Instant::now();
        let vm = Vm::restore(run.places, &template)?;
        times.push(format!("{:.0} ms", start.elapsed().as_secs_f64() * 1e3));
        ensure!(vm.sh("cat /root/mark")? == "kept", "the clone lost a file");
        run.clones.push(vm);
    }
    Ok(format!("agent ready after {}", times.join(" and ")))
}

/// Everything that two clones of one memory must not share.
fn identities(run: &mut Run<'_>) -> Result<String> {
    let mut seen = Vec::new();
    for vm in &run.clones {
        let said = vm.sh(
            "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id
            head -c 16 /dev/urandom | od -An -tx1; date +%s; awk '{print int($1)}' /proc/uptime",
        )?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let lines: Vec<String> = said.lines().map(str::to_owned).collect();
        ensure!(lines.len() == 6 && lines[0] == vm.hostname, "{said:?}");
        let clock: u64 = lines[4].parse()?;
        ensure!(now.abs_diff(clock) <= 3, "clock {clock} instead of {now}");
        seen.push(lines);
    }
    let [a, b] = &seen[..] else {
        bail!("{} clones", seen.len());
    };
    for (i, what) in ["host name", "machine id", "boot id", "random bytes"]
        .iter()
        .enumerate()
    {
        ensure!(a[i] != b[i], "both clones have {what} {}", a[i]);
    }
    Ok("host name, machine id, boot id, random bytes; clock right".to_owned())
}

fn second_generation(run: &mut Run<'_>) -> Result<String> {
    let template = run.template("two");
    let mut parent = run.clones.pop().context("no clone")?;
    parent.sh("echo second > /root/second")?;
    parent.process.control.snapshot(&template)?;
    drop(parent);
    let child = Vm::restore(run.places, &template)?;
    let both = child.sh("cat /root/mark /root/second")?;
    ensure!(both == "kept\nsecond", "{both:?}");
    fs::remove_dir_all(&template)?;
    Ok(String::new())
}

/// A few MB instead of all, and the clone of it goes on.
fn diff(run: &mut Run<'_>) -> Result<String> {
    let (base, dir) = (run.template("one"), run.template("diff"));
    let mut parent = Vm::restore(run.places, &base)?;
    parent.sh("echo third > /root/third; head -c 1M /dev/urandom > /dev/shm/third; sync")?;
    let sum = parent.sh("sha256sum /dev/shm/third")?;
    parent.process.control.snapshot_diff(&dir)?;
    drop(parent);
    let manifest = manifest(&dir)?;
    let named = manifest.base.context("no base")?.dir;
    ensure!(named == base, "the base is {}", named.display());
    let bytes = manifest.memory_sum.bytes;
    ensure!(bytes < MEMORY.0 / 4, "the diff has {bytes} bytes");
    let child = Vm::restore(run.places, &dir)?;
    let said = child.sh("cat /root/mark /root/third; sha256sum /dev/shm/third")?;
    ensure!(said == format!("kept\nthird\n{sum}"), "{said:?}");
    fs::remove_dir_all(&dir)?;
    Ok(format!("{} KiB of memory", bytes >> 10))
}

/// All run, all reach the devices, and a restore brings all back.
fn four_vcpus(run: &mut Run<'_>) -> Result<String> {
    const WORK: &str = "nproc
        for cpu in 0 1 2 3; do
            taskset -c $cpu bash -ec \"dd if=/dev/urandom of=/var/tmp/$cpu bs=64k count=8 \
                conv=fsync status=none; echo 3 > /proc/sys/vm/drop_caches; \
                head -c 4M /dev/vda | cksum; cksum < /var/tmp/$cpu > /dev/null\" &
        done; wait";
    let template = run.template(SMP);
    let mut laps = Laps(Vec::new(), Instant::now());
    let mut vm = Vm::boot(run.places, (MEMORY, 4), None)?;
    laps.lap("boot");
    let before = check_four(&vm.sh(WORK)?)?;
    laps.lap("I/O");
    // Taken under load on all: that they go on is seen in the clone. `1<>` does not empty the file first,
    // so that a reader always finds a number.
    vm.sh("for cpu in 0 1 2 3; do
        taskset -c $cpu bash -c 'n=0; while :; do n=$((n+1)); echo $n 1<> /run/count$0; done' $cpu \
            > /dev/null 2>&1 &
        echo $!; done > /run/load
        until test $(cat /run/count? 2> /dev/null | wc -l) = 4; do sleep 0.01; done")?;
    vm.process.control.snapshot(&template)?;
    laps.lap("snapshot");
    drop(vm);
    let clone = Vm::restore(run.places, &template)?;
    laps.lap("restore");
    all_go_on(&clone)?;
    clone.sh("kill $(cat /run/load)")?;
    laps.lap("going on");
    ensure!(check_four(&clone.sh(WORK)?)? == before, "other bytes");
    laps.lap("I/O");
    Ok(laps.0.join(", "))
}

/// All counters of the load rise.
fn all_go_on(clone: &Vm) -> Result<()> {
    let counts = || numbers(&clone.sh("cat /run/count0 /run/count1 /run/count2 /run/count3")?);
    let first = counts()?;
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let now = counts()?;
        if now.iter().zip(&first).all(|(now, first)| now > first) {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "a vCPU stands still: {first:?} {now:?}"
        );
    }
}

/// All attempts, each in a VMM of its own; and the state of VMMs that have threads for further vCPUs.
fn confinement(run: &mut Run<'_>) -> Result<String> {
    let smp = run.template(SMP);
    let all = prove(run.places, &run.template("one"), &[])?;
    ensure!(
        all.classes >= CLASSES,
        "the cases are of {} classes",
        all.classes
    );
    let state = prove(run.places, &smp, &[STATE.to_owned()])?;
    fs::remove_dir_all(&smp)?;
    Ok(format!("{all} held; {} of VMs with 4 vCPUs", state.cases))
}

/// The cases of the prover that were asked for by name.
fn chosen_cases(run: &mut Run<'_>) -> Result<String> {
    run.vm = None;
    let cases = run.places.cases.as_deref().unwrap_or_default();
    let held = prove(run.places, &run.template("one"), cases)?;
    Ok(format!("{held} held"))
}

/// RAM on both sides of the hole: the kernel takes what lies above first. Most of it is never touched, so
/// that a host with less can run it.
fn above_the_hole(run: &mut Run<'_>) -> Result<String> {
    const BYTES: Bytes = Bytes::mib(3072 + 256);
    const USE: &str = "sha256sum /dev/shm/high";
    let (whole, diff) = (run.template("high"), run.template("high-diff"));
    let mut laps = Laps(Vec::new(), Instant::now());
    let mut vm = Vm::boot(run.places, (BYTES, 1), None)?;
    laps.lap("boot");
    let map = vm.sh("grep 'System RAM' /proc/iomem; awk '/MemTotal/ {print $2}' /proc/meminfo")?;
    let total: u64 = map.lines().last().unwrap_or_default().parse()?;
    ensure!(
        map.contains("100000000-10fffffff : System RAM") && total > 3_200_000,
        "{map}"
    );
    let sum = vm.sh(&format!("head -c 12M /dev/urandom > /dev/shm/high; {USE}"))?;
    vm.process.control.snapshot(&whole)?;
    laps.lap("snapshot");
    drop(vm);
    let mut clone = Vm::restore(run.places, &whole)?;
    laps.lap("restore");
    ensure!(clone.sh(USE)? == sum, "other bytes");
    let more = clone.sh(&format!("head -c 1M /dev/urandom >> /dev/shm/high; {USE}"))?;
    clone.process.control.snapshot_diff(&diff)?;
    laps.lap("diff");
    drop(clone);
    let clone = Vm::restore(run.places, &diff)?;
    laps.lap("restore");
    ensure!(
        clone.sh(USE)? == more,
        "other bytes in the clone of the diff"
    );
    fs::remove_dir_all(&whole)?;
    fs::remove_dir_all(&diff)?;
    Ok(laps.0.join(", "))
}

/// Leaves a template for [`lesser_cpu`] on the disk that both hosts have.
fn keep(run: &mut Run<'_>) -> Result<String> {
    let Some(kept) = &run.places.kept else {
        return Ok("not done here: this host has one CPU".to_owned());
    };
    let (from, to) = (run.template("one"), kept.join("one"));
    fs::create_dir(&to)?;
    for name in [template_file::STATE, MANIFEST_NAME] {
        fs::copy(from.join(name), to.join(name))?;
    }
    // A restore only measures the large files; that of a CPU that lacks something ends before it uses them.
    for name in [template_file::MEMORY, template_file::LAYER] {
        let bytes = fs::metadata(from.join(name))?.len();
        fs::File::create(to.join(name))?.set_len(bytes)?;
    }
    Ok("the template of this CPU".to_owned())
}

/// The template of a CPU that had more is refused, and each feature that is missing is named.
fn lesser_cpu(run: &mut Run<'_>) -> Result<String> {
    let kept = run.places.kept.as_ref().context("no kept template")?;
    let expected = run.places.lacking.as_deref().unwrap_or_default();
    let refused = match Vm::restore_paused(run.places, &kept.join("one")) {
        Ok(_) => bail!("a CPU without {expected} took the template"),
        Err(error) => format!("{error:#}"),
    };
    let (_, lacks) = refused.split_once("it lacks: ").context(refused.clone())?;
    let mut named: Vec<_> = lacks.trim().split(", ").collect();
    let mut wanted: Vec<_> = expected.split(',').collect();
    named.sort_unstable();
    wanted.sort_unstable();
    ensure!(named == wanted, "{refused}");
    Ok(format!("refused: lacks {}", named.join(", ")))
}

/// How long each part of a step took.
struct Laps(Vec<String>, Instant);

impl Laps {
    fn lap(&mut self, what: &str) {
        let seconds = self.1.elapsed().as_secs_f64();
        self.1 = Instant::now();
        self.0.push(format!("{what} {seconds:.1} s"));
    }
}

fn numbers(text: &str) -> Result<Vec<u64>> {
    let numbers = text.lines().map(|line| Ok(line.trim().parse()?));
    let numbers = numbers.collect::<Result<Vec<u64>>>()?;
    ensure!(numbers.len() == 4, "{text:?}");
    Ok(numbers)
}

/// Four processors, and the same sum read by all.
fn check_four(said: &str) -> Result<String> {
    let lines: Vec<_> = said.lines().collect();
    match lines[..] {
        ["4", a, b, c, d] if [b, c, d] == [a; 3] => Ok(a.to_owned()),
        _ => bail!("{said:?}"),
    }
}

/// What the kernel does for each, the VMM says in other words.
fn ends(run: &mut Run<'_>) -> Result<String> {
    let ends = [
        ("o", "powered off"),
        ("b", "asked for a reboot"),
        ("c", "crashed"),
    ];
    for (key, said) in ends {
        let mut clone = Vm::restore(run.places, &run.template("one"))?;
        // Later, so that the answer to this command still comes.
        clone.sh(&format!(
            "(sleep 0.2; echo {key} > /proc/sysrq-trigger) > /dev/null 2>&1 &"
        ))?;
        let deadline = Instant::now() + Duration::from_secs(30);
        let reason = loop {
            if let Some(reason) = clone.process.control.stats()?.exit_reason {
                break reason;
            }
            ensure!(Instant::now() < deadline, "the guest goes on after {key:?}");
            thread::sleep(Duration::from_millis(20));
        };
        ensure!(reason.contains(said), "{key:?} became {reason:?}");
    }
    Ok("power-off, reboot, crash".to_owned())
}

/// A killed VMM leaves nothing that stands in the way of the next.
fn kill(run: &mut Run<'_>) -> Result<String> {
    let clone = run.clones.pop().context("no clone")?;
    let pid = clone.process.pid();
    clone.process.kill()?;
    ensure!(
        !Path::new(&format!("/proc/{pid}")).exists(),
        "process {pid} is still there"
    );
    let next = Vm::restore(run.places, &run.template("one"))?;
    ensure!(
        next.sh("cat /root/mark")? == "kept",
        "the clone lost a file"
    );
    run.clones.push(next);
    Ok(String::new())
}

/// What is done to a template, how, and what the refusal must say.
type Damage = (&'static str, fn(&Path) -> Result<()>, &'static str);

/// Each is refused with its reason, and the VMM that refused goes on serving.
fn bad_snapshots(run: &mut Run<'_>) -> Result<String> {
    let good = run.template("one");
    let bad = run.template("bad");
    let damage: [Damage; 5] = [
        ("shorter memory", shorten_memory, "bytes, the manifest says"),
        ("a changed bit", change_state, "SHA-256 differs"),
        ("another format", other_format, "template of format"),
        ("another platform", other_platform, "template of platform"),
        ("no manifest", remove_manifest, "cannot read"),
    ];
    for (what, make, reason) in damage {
        copy(&good, &bad)?;
        make(&bad).with_context(|| format!("cannot make {what}"))?;
        let refused = match Vm::restore_paused(run.places, &bad) {
            Ok(_) => bail!("{what} was taken"),
            Err(error) => format!("{error:#}"),
        };
        ensure!(refused.contains(reason), "{what}: {refused}");
        fs::remove_dir_all(&bad)?;
    }
    Ok(format!("{} refused with their reasons", damage.len()))
}

/// The large files are shared: none of the damages below writes into them.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    for name in [template_file::STATE, MANIFEST_NAME] {
        fs::copy(from.join(name), to.join(name))?;
    }
    for name in [template_file::MEMORY, template_file::LAYER] {
        fs::hard_link(from.join(name), to.join(name))?;
    }
    Ok(())
}

fn shorten_memory(dir: &Path) -> Result<()> {
    let path = dir.join(template_file::MEMORY);
    fs::remove_file(&path)?;
    Ok(fs::File::create(path)?.set_len(1 << 20)?)
}

fn change_state(dir: &Path) -> Result<()> {
    let path = dir.join(template_file::STATE);
    let mut bytes = fs::read(&path)?;
    if let Some(last) = bytes.last_mut() {
        *last ^= 1;
    }
    Ok(fs::write(path, bytes)?)
}

fn edit(dir: &Path, key: &str, value: serde_json::Value) -> Result<()> {
    let path = dir.join(MANIFEST_NAME);
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    manifest[key] = value;
    Ok(fs::write(path, serde_json::to_vec(&manifest)?)?)
}

fn other_format(dir: &Path) -> Result<()> {
    edit(dir, "format", 9999.into())
}

fn other_platform(dir: &Path) -> Result<()> {
    edit(dir, "platform", "ring3".into())
}

fn remove_manifest(dir: &Path) -> Result<()> {
    Ok(fs::remove_file(dir.join(MANIFEST_NAME))?)
}
