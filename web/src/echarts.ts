// ECharts with only what the page draws; a chunk of its own, loaded when a pane first needs it.

import { use, init } from "echarts/core";
import { BarChart, HeatmapChart, LineChart, RadarChart, ScatterChart } from "echarts/charts";
import { AriaComponent, GridComponent, LegendComponent, RadarComponent, TooltipComponent, VisualMapComponent } from "echarts/components";
import { LabelLayout } from "echarts/features";
import { CanvasRenderer } from "echarts/renderers";

use([BarChart, HeatmapChart, LineChart, RadarChart, ScatterChart, AriaComponent, GridComponent, LegendComponent, RadarComponent, TooltipComponent, VisualMapComponent, LabelLayout, CanvasRenderer]);
export { init };
