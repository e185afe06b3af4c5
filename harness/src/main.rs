//! `cube-bench`: the command line of the harness.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main().into()
}
