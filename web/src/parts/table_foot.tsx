/** The line below a table: how many of its rows are shown, of which module, and a button that saves them. */
import { hasModuleSelection, selectedName } from "../store/modules";
import { clear } from "../store/selection";
import { formatNumber, pluralize } from "./units";

interface Props {
  readonly numShown: number;
  readonly numRows: number;
  readonly hasModules: boolean;
  readonly unknownSort: string;
  readonly onClearSort: () => void;
  readonly onSave: () => void;
}

/** Number of rows shown, and the module that they are filtered by. */
export function TableFoot({
  numShown,
  numRows,
  hasModules,
  unknownSort,
  onClearSort,
  onSave,
}: Props) {
  const isFiltered = hasModules && hasModuleSelection.value;
  return (
    <div class="table-bottom">
      <div class="table-foot" role="status">
        {numShown === numRows
          ? pluralize(numRows, "row")
          : `${formatNumber(numShown)} of ${pluralize(numRows, "row")}`}
        {isFiltered && (
          <>
            {" in "}
            <b>{selectedName.value}</b>
            <button type="button" class="text-button" onClick={() => clear("module")}>
              show all modules
            </button>
          </>
        )}
        {unknownSort && (
          <span class="unknown-sort">
            {` The address sorts by `}
            <code>{unknownSort}</code>, which is no column.
            <button type="button" class="text-button" onClick={onClearSort}>
              clear
            </button>
          </span>
        )}
      </div>
      <button
        type="button"
        class="text-button table-save"
        title="Save these rows as a CSV file"
        onClick={onSave}
      >
        CSV
      </button>
    </div>
  );
}
