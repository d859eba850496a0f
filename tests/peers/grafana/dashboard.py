"""Checks the dashboard against Grafana's own types: see run.sh. Writes a TypeScript file that gives every part of
the dashboard its type.

The types are those of the package `@grafana/schema`. Their enumerations become unions of the values that stand in a
board's JSON, so that the compiler compares values and not only kinds; a key that a type does not know is refused, as
in every literal."""

import json
import pathlib
import re
import sys

TYPES = pathlib.Path("node_modules/@grafana/schema/dist/esm")
# The types of a panel's options and of its fields' options, by the panel's type; missing if it has none.
PANELS = {"timeseries": ("TimeSeriesPanelCfg", "timeseries"), "stat": ("StatPanelCfg", "stat"),
          "table": ("TablePanelCfg", "table")}


def as_unions():
    """Enumerations of values instead of names."""
    for path in TYPES.rglob("*.d.ts"):
        text = path.read_text()

        def union(found):
            values = re.findall(r"=\s*(\"[^\"]*\"|'[^']*'|-?\d+)", found[2])
            return f"export type {found[1]} = {' | '.join(values)};"

        new = re.sub(r"export declare (?:const )?enum (\w+) \{(.*?)\}", union, text, flags=re.S)
        # Grafana has defaults for the required fields of a panel. A dashboard contains only other values.
        if "panelcfg" in path.parts:
            new = new.replace("import * as common from '@grafana/schema'",
                              "import * as common from '../../../../../common/common.gen'")
        if new != text:
            path.write_text(new)


def literal(value):
    return json.dumps(value, indent=1)


def main():
    board = json.loads(pathlib.Path(sys.argv[1]).read_text())
    as_unions()
    at = "./node_modules/@grafana/schema/dist/esm"
    lines = [f"import type * as d from '{at}/raw/dashboard/x/dashboard_types.gen';",
             "type Deep<T> = T extends (infer U)[] ? Deep<U>[] : T extends object ? {[K in keyof T]?: Deep<T[K]>} : T;",
             "type Target = {refId: string; datasource: d.DataSourceRef; expr: string; legendFormat?: string; "
             "instant?: boolean; format?: 'table' | 'time_series' | 'heatmap'};"]
    for kind, (file, folder) in PANELS.items():
        lines.append(f"import type * as {kind} from '{at}/raw/composable/{folder}/panelcfg/x/{file}_types.gen';")
    whole = {key: value for key, value in board.items() if key != "panels"}
    for variable in whole["templating"]["list"]:
        # Grafana writes this field, and its types omit it: the description of a variable.
        said = variable.pop("definition", None)
        if said is not None and said != variable["query"]["query"]:
            sys.exit(f"{variable['name']}: {said}")
    lines.append(f"export const whole: Deep<d.Dashboard> = {literal(whole)};")
    checked = 0
    for panel in board["panels"]:
        name = f"panel{panel['id']}"
        if panel["type"] == "row":
            lines.append(f"export const {name}: d.RowPanel = {literal(panel)};")
            continue
        kind = panel["type"]
        options, targets = panel.pop("options"), panel.pop("targets")
        custom = panel["fieldConfig"]["defaults"].pop("custom", None)
        lines.append(f"export const {name}: d.Panel = {literal(panel)}; // {panel['title']}")
        lines.append(f"export const {name}Options: Deep<{kind}.Options> = {literal(options)};")
        lines.append(f"export const {name}Targets: Target[] = {literal(targets)};")
        if custom is not None:
            lines.append(f"export const {name}Custom: Deep<{kind}.FieldConfig> = {literal(custom)};")
        checked += 1
    # The check fails for an unknown key and for an invalid value.
    lines.append("// @ts-expect-error")
    lines.append("export const wrong1: d.Panel = {type: 'stat', tilte: 'x'};")
    lines.append("// @ts-expect-error")
    lines.append("export const wrong2: Deep<timeseries.Options> = {legend: {displayMode: 'lists'}};")
    pathlib.Path("board.ts").write_text("\n".join(lines) + "\n")
    print(f"== {checked} panels, {len(board['templating']['list'])} variables")


main()
