# SPDX-License-Identifier: Apache-2.0
"""Each language that comes with the project: right, wrong, not compiled, too slow; by the judge, with its compilers."""

from __future__ import annotations

import pytest

import opendsec as od

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the image is built first, if it is not kept
LIMITS = od.FnLimits(cpu_time_s=10, wall_time_s=30, memory="256MiB")
FOREVER = od.FnLimits(cpu_time_s=0.5, wall_time_s=30, memory="256MiB")

# Each doubles a number, but goes on for ever on 7.
PROGRAMS = {
    "python": "n = int(input())\nwhile n == 7: pass\nprint(2 * n)",
    "bash": "read n\nwhile [ $n = 7 ]; do :; done\necho $((2 * n))",
    "javascript": "const n = Number(require('fs').readFileSync(0)); while (n === 7); console.log(2 * n)",
    "c": '#include <stdio.h>\nint main(void) { volatile int n; scanf("%d", (int *)&n); while (n == 7); printf("%d\\n", 2 * n); }',
    "cpp": "#include <iostream>\nint main() { volatile int n; int m; std::cin >> m; n = m; while (n == 7); std::cout << 2 * m << '\\n'; }",
    "java": (
        "import java.util.Scanner;\npublic class Main { static volatile int n; public static void main(String[] a) {"
        " n = new Scanner(System.in).nextInt(); while (n == 7); System.out.println(2 * n); } }"
    ),
    "go": 'package main\nimport "fmt"\nfunc main() { var n int; fmt.Scan(&n); for n == 7 { }; fmt.Println(2 * n) }',
    "rust": (
        "use std::io;\nfn main() { let mut s = String::new(); io::stdin().read_line(&mut s).unwrap(); let n: i64 ="
        " s.trim().parse().unwrap();"
        ' while n == 7 {} println!("{}", 2 * n); }'
    ),
}
COMPILED = ("c", "cpp", "java", "go", "rust")


@pytest.mark.parametrize("language", PROGRAMS)
async def test_language(language: str, client: od.Client) -> None:
    tests = (
        od.Test(name="right", stdin=b"4\n", expected=b"8\n"),
        od.Test(name="wrong", stdin=b"4\n", expected=b"9\n"),
        od.Test(name="slow", stdin=b"7\n", expected=b"14\n", limits=FOREVER),
        od.Test(name="right again", stdin=b"-3\n", expected=b"-6\n"),
    )
    result = await client.judge(od.JudgeTask(source=PROGRAMS[language], language=language, tests=tests, limits=LIMITS))
    shown = [(test.name, test.outcome, test.message, test.result and test.result.stderr.data[-300:]) for test in result.tests]
    assert [test.outcome for test in result.tests] == ["ok", "wrong_answer", "time_limit", "ok"], shown
    assert (result.compile is not None) == (language in COMPILED)


@pytest.mark.parametrize("language", COMPILED)
async def test_what_does_not_compile(language: str, client: od.Client) -> None:
    result = await client.call(source="this is no program", language=language)
    assert result.outcome == "compile_error" and result.compile is not None and result.compile.stderr + result.compile.stdout, result


async def test_every_language_is_tested(client: od.Client) -> None:
    assert {language.name for language in await client.languages()} == set(PROGRAMS)
