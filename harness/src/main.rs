//! `cube-bench`: see `cube-bench --help`.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main().into()
}
